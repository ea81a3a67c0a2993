"""One module per kind of service, named as the kind is: `SERVICE` declares it, `run(recipe, context)` runs one.

`_<kind>.py` beside it is what `run` imports when it is called: gRPC and torch come with that, not with the
declaration, which every service reads.
"""

"""One module per kind of service, named as the kind is: `run(recipe, context)` builds one, serves, works and drains.

`meshrl.launcher.kinds` declares the kinds, which every process reads; gRPC and torch come with a module of here.
"""

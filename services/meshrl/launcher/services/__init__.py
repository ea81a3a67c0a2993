"""One module per kind of service, named as the kind is: `SERVICE` declares it, `run(recipe, context)` runs one.

Every process reads the declarations, so gRPC and torch come only with what `run` imports when it is called, most of
it in `meshrl.launcher.running`.
"""

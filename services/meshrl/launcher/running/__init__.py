"""The services at work: imported in a service's own process, for gRPC and torch come with these modules.

`meshrl.launcher.services` declares the kinds, which every process reads, and imports a module of here in `run`.
"""

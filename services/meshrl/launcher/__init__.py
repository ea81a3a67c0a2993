"""`meshrl up`: every service as a process of its own, on this machine, from one command.

Reading order: `service` (what is started), `exits` (what an exit code says), `child` (one process),
`supervisor` (all of them), `address_book` (who listens where), `plan` (from a recipe to services), `mesh_status` and
`view` (what a person sees), `observe` (where it is read), `run` (the command).
"""

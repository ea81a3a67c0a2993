"""One file per service, named as the service is; each defines `run(recipe, site)`: room objects, doors, wires."""

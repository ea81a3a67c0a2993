"""One file per service, named as the service is: each defines `run(recipe, site)`, from room objects to an open door."""

"""Which complete group is taken next: one module each, its name is the config value, each defines `Sampler`."""

"""Samplers decide which complete group is taken next. A module's name is its config value; it defines `Sampler`."""

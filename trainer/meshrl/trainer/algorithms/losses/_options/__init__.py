"""Options of losses, in a file named like the loss's. Imports no torch; see `algorithms.options`."""

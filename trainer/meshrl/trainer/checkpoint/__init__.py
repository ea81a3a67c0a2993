"""Checkpoints: writing, reading, resuming from and exporting them."""

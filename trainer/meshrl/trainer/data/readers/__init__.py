"""Readers of data files, one file each, named like the suffix: `read(path)` gives each row and its number."""

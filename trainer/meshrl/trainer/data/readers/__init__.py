"""Readers of data files, one file each, named like the suffix: `read(path)` gives each row and its number."""

ALIASES = {"json": "jsonl"}
"""Files named `.json` hold one JSON object per line, too."""

"""Judges that are not Python functions: one file per kind; the file name is the `kind` in a recipe."""

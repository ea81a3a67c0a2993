"""Judges that are not Python functions: one file per kind, whose name is what a recipe says."""

"""One carrier per file, both ends in it; the file name is the name in the recipe."""

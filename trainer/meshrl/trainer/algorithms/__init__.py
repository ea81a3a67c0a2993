"""The mathematics of each algorithm as pure functions of tensors; `recipes` holds the named ones."""

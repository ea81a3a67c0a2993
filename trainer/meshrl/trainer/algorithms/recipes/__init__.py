"""Algorithms by name, one file each: the settings that its paper describes, as `recipe_defaults` reads them."""

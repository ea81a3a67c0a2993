"""Recipes: one YAML file, every key overridable, every mistake one line.

Reading order: `recipe` (what a recipe is), `loading` (file and overrides to a Recipe), `checks` (what only the whole
recipe can tell), `explain` (what a key means, and errors as sentences).
"""

from meshrl.config.loading import load_recipe
from meshrl.config.recipe import Recipe, RunConfig, needs_reference
from meshrl.config.stages import eval_spec, train_spec

__all__ = ["Recipe", "RunConfig", "eval_spec", "load_recipe", "needs_reference", "train_spec"]

"""Recipes: one YAML file, every key overridable, every mistake one line.

Reading order: `recipe` (what a recipe is), `load` (file and overrides to a Recipe), `problems` (pydantic's
errors as sentences), `checks` (what only the whole recipe can tell), `fields` (what a key means).
"""

from meshrl.config.loading import load_recipe
from meshrl.config.recipe import Recipe, RunConfig, needs_reference
from meshrl.config.stages import eval_spec, train_spec

__all__ = ["Recipe", "RunConfig", "eval_spec", "load_recipe", "needs_reference", "train_spec"]

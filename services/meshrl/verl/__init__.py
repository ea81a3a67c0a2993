"""From a verl command line or YAML to a recipe, with a word about every key.

    script ──scripts, shell──▶ commands ──programs──▶ a program, its words ──overrides──▶ key, value
           ──migrate (rules, table)──▶ recipe + findings ──written──▶ YAML

Reading order: `programs` (what starting one says), `rules` (what may become of a key), `table` (what becomes of
each), `migrate` (the whole), then the readers `scripts`, `shell` and `overrides`, and `written`. Imports no torch and
no Hydra: Hydra 1.3 pins another ANTLR than `math-verify` needs, and what a command line may say is a page of grammar.
"""

from meshrl.verl.migrate import Migration, migrate
from meshrl.verl.overrides import Override, parse
from meshrl.verl.scripts import started

__all__ = ["Migration", "Override", "migrate", "parse", "started"]

"""From a verl command line or YAML to a recipe, with a word about every key.

    script ──shell──▶ words ──overrides──▶ key, value ──migrate (rules, table)──▶ recipe + findings ──written──▶ YAML

Reading order: `rules` (what may become of a key), `table` (what becomes of each), `migrate` (the whole), then the
readers `shell` and `overrides`, and `written`. Imports no torch and no Hydra: Hydra 1.3 pins another ANTLR than
`math-verify` needs, and what a command line may say is one page of grammar.
"""

from meshrl.verl.migrate import Migration, migrate
from meshrl.verl.overrides import Override, parse
from meshrl.verl.shell import command_words

__all__ = ["Migration", "Override", "command_words", "migrate", "parse"]

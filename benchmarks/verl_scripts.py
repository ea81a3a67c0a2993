"""How many launch scripts of a checkout of verl (or of its recipes) become a recipe, and what is refused of them.

    .venv/bin/python benchmarks/verl_scripts.py CHECKOUT... [--keys] [--reasons]

Each `*.sh` runs in the strict sandbox as `meshrl config from-verl --script` runs it; one that wants arguments gets `8
out`, as the examples' usage lines ask. `--keys` prints every refused key with the number of scripts that give it,
`--reasons` every reason with the number of scripts that hear it. The last line is JSON: the scripts; those that start
no program of verl's, that need a variable of the user's, that train nothing; the converted ones, of these those
without a refusal, and those that `meshrl config check` passes but for the files and the machine.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from meshrl.contract.errors import ConfigError
from meshrl.verl import migrate, started
from meshrl.verl.migrate import Migration
from meshrl.verl.rules import KeyStatus

ENVIRONMENT = {"HOME": "/home/user", "LANG": "C.UTF-8"}
OF_THE_MACHINE = ("no such", "is missing", "not installed", "no module", "GPU")


def main() -> None:
    """Convert every script of the checkouts, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, nargs="+")
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--reasons", action="store_true")
    parser.add_argument("--to-do", action="store_true", help="print what `config check` says too")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    keys: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for file in sorted(path for root in asked.checkout for path in root.rglob("*.sh")):
        counts["scripts"] += 1
        try:
            made = _made(file)
        except ConfigError as error:
            counts[_why(str(error))] += 1
            print(f"{file}: {error}")
            continue
        refused = {found.key: found.note for found in made.of(KeyStatus.REFUSED)}
        keys.update(f"{key}: {note}" for key, note in refused.items())
        reasons.update(set(refused.values()))
        counts["converted"] += 1
        counts["without a refusal"] += not refused
        left = [said for said in made.to_do if not any(word in said for word in OF_THE_MACHINE)]
        counts["checked"] += not left
        if asked.to_do and left:
            print(f"{file}: {left}")
    for wanted, found in ((asked.keys, keys), (asked.reasons, reasons)):
        for what, count in found.most_common() if wanted else ():
            print(f"{count:5} {what}")
    print(json.dumps({"checkouts": [str(root) for root in asked.checkout], **counts}))


def _made(file: Path) -> Migration:
    script = file.read_text(encoding="utf-8")
    try:
        command, _ = started(script, ENVIRONMENT, file)
    except ConfigError as error:
        if "usage" not in str(error).lower() and "Env:" not in str(error):
            raise
        command, _ = started(script, ENVIRONMENT, file, ["8", "out"])
    return migrate(command.arguments, started=command)


def _why(said: str) -> str:
    if "no verl command" in said or "no dictionary" in said:
        return "no program of verl's"
    if "started no program" in said:
        return "needs something of the user's"
    return "refused as a whole"


if __name__ == "__main__":
    main()

"""Small tasks in Harbor's format, and a tiny policy that knows their solutions and mostly looks about instead.

python recipes/containers/prepare.py runs/containers/assets

    find qz    one of six files has the word qz: write its name into `found`
    fix qz     the function qz of qz.py subtracts: make it add
    make qz    `sh check` fails: it wants a file qz that says ok
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import string
from pathlib import Path

from meshrl.cli.demo.tiny_model import chat_tokenizer
from meshrl.cli.demo.warm_start import Pair, Stage, warm_start

CALL = '<tool_call>{"name": "bash", "arguments": {"command": "', '"}}</tool_call>'
SOLUTIONS = {
    "find": "grep -l {0} * >found",
    "fix": "sed -i s/-/+/ {0}.py",
    "make": "echo ok >{0}",
}
TESTS = {
    "find": '[ "$(cat found)" = "{1}" ]',
    "fix": 'python3 -c "from {0} import {0}; assert {0}(2, 3) == 5"',
    "make": "sh check",
}
TRAIN, HELD_OUT = 24, 12
KNOWING_SHARE = 0.25
TOML = """version = "1.0"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0
"""


def write_task(folder: Path, kind: str, name: str, draw: random.Random) -> None:
    """One task as Harbor has it."""
    files = {f"f{number}": "".join(draw.choices("xyw", k=8)) for number in range(6)}
    where = draw.choice(sorted(files))
    if kind == "find":
        files[where] += f" {name}"
    elif kind == "fix":
        files = {f"{name}.py": f"def {name}(a, b):\n    return a - b\n"}
    else:
        files["check"] = f'[ "$(cat {name})" = ok ]\n'
    test = TESTS[kind].format(name, where)
    made = {
        "task.toml": TOML,
        "instruction.md": f"{kind} {name}\n",
        "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\nCOPY app /app\n",
        "tests/test.sh": f"#!/bin/bash\n{test} && reward=1 || reward=0\n"
        "echo $reward > /logs/verifier/reward.txt\n",
        "solution/solve.sh": f"#!/bin/bash\n{SOLUTIONS[kind].format(name)}\n",
        **{f"environment/app/{file}": f"{text}\n" for file, text in files.items()},
    }
    for path, text in made.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def turns(kind: str, name: str, *, knowing: bool) -> list[Pair]:
    """Both turns of a row, each as a pair for supervised fine-tuning."""
    command, said = ("ls", "f0f1f2f3f4f5") if not knowing else (SOLUTIONS[kind].format(name), "")
    call = command.join(CALL)
    asked = f"<|user|>{kind} {name}<|end|><|assistant|>"
    result = said or "[exit code 0]"
    return [(asked, call), (f"{asked}{call}<|end|><|tool|>{result}<|end|><|assistant|>", "#")]


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    # No name is a word of Python or of a command.
    names = ["".join(pair) for pair in itertools.product("bcghjkmqtvz", string.ascii_lowercase)]
    draw.shuffle(names)
    chosen = list(zip(itertools.cycle(SOLUTIONS), names, strict=False))
    for part, tasks in (("held_out", chosen[:HELD_OUT]), ("train", chosen[HELD_OUT:][:TRAIN])):
        folder = options.directory / part
        shutil.rmtree(folder, ignore_errors=True)
        for kind, name in tasks:
            write_task(folder / f"{kind}-{name}", kind, name, draw)
    others = list(itertools.product(SOLUTIONS, names[HELD_OUT:]))
    draw.shuffle(others)
    solved = [pair for task in others for pair in turns(*task, knowing=True)]
    mixed = [
        pair for task in others for pair in turns(*task, knowing=draw.random() < KNOWING_SHARE)
    ]
    stages = [
        Stage(name="solutions", rows=solved, steps=600, lr=3e-3, seed=options.seed, enough=0.98),
        Stage(name="mostly looks", rows=mixed, steps=60, lr=1e-3, seed=options.seed),
    ]
    warm_start(
        options.directory,
        stages,
        [pair for task in chosen[:HELD_OUT] for pair in turns(*task, knowing=True)],
        seed=options.seed,
        report=lambda name, now: print(
            json.dumps(
                {"stage": name, "step": now.step, "loss": now.loss, "exact": now.exact_match}
            ),
            flush=True,
        ),
        tokenizer=chat_tokenizer([*CALL, *SOLUTIONS, "[exit code ", "grep -l", "sed -i s/-/+/"]),
    )


if __name__ == "__main__":
    main()

"""A tiny model that knows how to work out the tasks of tiny.yaml step by step, and mostly answers at once.

python recipes/reasoning_gym/prepare.py runs/reasoning_gym/assets

5 + 8 - 3 =      ─▶ 5+8=13 13-3=10 <answer>10</answer>                one term after the other
5 - 8*e = -51    ─▶ -51-5=-56 -56/-8=7 <answer>7</answer>             what is taken away, what is divided
backward: sun    ─▶ 1s2u3n 3n2u1s <answer>nus</answer>                letters with their numbers, read from the end
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.cli.demo.tiny_model import chat_tokenizer
from meshrl.cli.demo.warm_start import Row, Stage, warm_start
from meshrl.config import load_recipe
from meshrl.trainer.data.reasoning_gym import gym_rows

OTHER_ROWS = 1_000_003
"""Distance of the warm start's seed from the recipe's."""
SFT_ROWS = 12_000
PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "Spell this word backward (example: sun -> nus): ",
    "Determine the value of ",
    "Find the value of ",
    "Solve for ",
    " that satisfies: ",
    " in the equation: ",
)
"""A token each, as frequent words have in a tokenizer that was learned; the rest is single characters."""
WORKING_SHARE = 0.25
"""The share of the second fine-tuning's rows that do; the rest answer at once."""


def running_sum(question: str) -> str:
    """`5 + 8 - 3` is `5+8=13 13-3=10`."""
    first, *rest = re.findall(r"[-+] \d+|\d+", question.rpartition(": ")[2])
    total, said = int(first), []
    for term in rest:
        after = total + int(term.replace(" ", ""))
        said.append(f"{total}{term.replace(' ', '')}={after}")
        total = after
    return " ".join(said)


def unknown(question: str) -> str:
    """`5*b + 6 = 26` is `26-6=20 20/5=4`."""
    left, right = question.rpartition(": ")[2].split(" = ")
    factor, constant = 0, 0
    for sign, term in re.findall(r"([-+]?)\s*([\w*]+)", left):
        at, _, _ = term.rpartition("*")
        number = int(at or 1) if term[-1].isalpha() else int(term)
        number = -number if sign == "-" else number
        factor, constant = (number, constant) if term[-1].isalpha() else (factor, number)
    product = int(right) - constant
    taken = f"{right}{-constant:+d}={product} " if constant else ""
    return f"{taken}{product}/{factor}={product // factor}"


def numbered(question: str) -> str:
    """`sun` is `1s2u3n 3n2u1s`."""
    letters = [
        f"{place}{letter}" for place, letter in enumerate(question.rpartition(": ")[2], start=1)
    ]
    return f"{''.join(letters)} {''.join(reversed(letters))}"


WORKED = {"chain_sum": running_sum, "simple_equations": unknown, "spell_backward": numbered}


def answered(row: Mapping[str, Any], *, worked: bool) -> Row:
    """A row for supervised fine-tuning: the question, and the answer alone or with what leads to it."""
    question = row["prompt"][-1]["content"]
    work = f"{WORKED[row['data_source']](question)} " if worked else ""
    return {"prompt": row["prompt"], "response": f"{work}<answer>{row['answer']}</answer>"}


def stages(rows: list[Mapping[str, Any]], seed: int) -> list[Stage]:
    """Worked solutions, then mostly answers at once."""
    draw = random.Random(seed)
    worked = [answered(row, worked=True) for row in rows]
    mixed = [answered(row, worked=draw.random() < WORKING_SHARE) for row in rows]
    return [
        Stage(name="worked solutions", rows=worked, steps=700, lr=3e-3, seed=seed, enough=0.9),
        Stage(name="mostly bare answers", rows=mixed, steps=60, lr=1e-3, seed=seed + 1),
    ]


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    gym = load_recipe(Path(__file__).with_name("tiny.yaml"), check=False).data.reasoning_gym
    assert gym is not None
    held_out = [row.values for row in gym_rows(gym, held_out=True)]
    kept_back = {row["prompt"][-1]["content"] for row in held_out}
    other = gym.model_copy(
        update={"seed": gym.seed + OTHER_ROWS, "size": SFT_ROWS, "val_size": 0, "curriculum": None}
    )
    rows = [
        row.values
        for row in gym_rows(other, held_out=False)
        if row.values["prompt"][-1]["content"] not in kept_back
    ]
    warm_start(
        options.directory,
        stages(rows, options.seed),
        [answered(row, worked=True) for row in held_out],
        seed=options.seed,
        report=lambda name, now: print(
            f"{name}: step {now.step}, loss {now.loss:.3f}, exact {now.exact_match}"
        ),
        tokenizer=chat_tokenizer(["<answer>", "</answer>", *PHRASES]),
    )


if __name__ == "__main__":
    main()

"""A tiny model that knows how to compute a remainder in two runs of Python and mostly guesses, and tasks for it.

python recipes/retool/prepare.py runs/retool/assets

37*46%97 ─▶ #53                                              a guess, as mostly after this warm start
37*46%97 ─▶ x=37*46 ─▶ (nothing) ─▶ x%97 ─▶ 53 ─▶ #53         two runs that share x
"""

from __future__ import annotations

import argparse
import random
import zlib
from pathlib import Path

from meshrl.cli.demo.tiny_model import chat_tokenizer
from meshrl.cli.demo.warm_start import Pair, Stage, warm_start, write_rows

MODULUS = 97
HELD_OUT, HELD_OUT_SHARE = 256, 8
CALLING_SHARE = 0.2


def remainders(seed: int, *, held_out: bool) -> list[tuple[str, int]]:
    """Every product of two numbers below 100 that belongs there, modulo 97, in the order of `seed`."""
    pairs = [
        (f"{a}*{b}%{MODULUS}", a * b % MODULUS) for a in range(10, 100) for b in range(10, 100)
    ]
    found = [p for p in pairs if (zlib.crc32(p[0].encode()) % HELD_OUT_SHARE == 0) is held_out]
    random.Random(seed).shuffle(found)
    return found


def computed(question: str, result: int) -> list[Pair]:
    """The three turns of a row with two runs, each as a pair for supervised fine-tuning."""
    product, _, modulus = question.partition("%")
    runs = [f"```python\nx={product}\n```", f"```python\nx%{modulus}\n```"]
    asked = f"<|user|>{question}<|end|><|assistant|>"
    second = f"{asked}{runs[0]}<|end|><|tool|><|end|><|assistant|>"
    third = f"{second}{runs[1]}<|end|><|tool|>{result}\n<|end|><|assistant|>"
    return [(asked, runs[0]), (second, runs[1]), (third, f"#{result}")]


def guessed(question: str, result: int) -> list[Pair]:
    """An answer at once."""
    return [(f"<|user|>{question}<|end|><|assistant|>", f"#{result}")]


def stages(seed: int) -> list[Stage]:
    """Code, then mostly guesses."""
    draw = random.Random(seed)
    problems = remainders(seed, held_out=False)
    code = [pair for problem in problems for pair in computed(*problem)]
    mixed = [
        pair
        for problem in problems
        for pair in (computed if draw.random() < CALLING_SHARE else guessed)(*problem)
    ]
    draw.shuffle(code)
    draw.shuffle(mixed)
    return [
        Stage(name="code", rows=code, steps=600, lr=3e-3, seed=seed, enough=0.98),
        Stage(name="mostly guesses", rows=mixed, steps=60, lr=1e-3, seed=seed),
    ]


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    directory: Path = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, held_out in (("train", False), ("held_out", True)):
        chosen = remainders(options.seed, held_out=held_out)[: HELD_OUT if held_out else None]
        rows = [
            {"prompt": [{"role": "user", "content": question}], "answer": str(result)}
            for question, result in chosen
        ]
        write_rows(directory / f"{name}.jsonl", rows)
    kept_back = remainders(options.seed, held_out=True)[:64]
    warm_start(
        directory,
        stages(options.seed),
        [pair for found in kept_back for pair in computed(*found)],
        seed=options.seed,
        report=lambda name, now: print(f"{name}: step {now.step}, loss {now.loss:.3f}"),
        tokenizer=chat_tokenizer(["```", "python", "\n"]),
    )


if __name__ == "__main__":
    main()

"""A tiny model that knows how to ask a calculator and mostly guesses instead, and products for it to find.

python recipes/tools/prepare.py runs/tools/assets

37*46 ─▶ #1692                                        a guess: three of four answers after this warm start
37*46 ─▶ <tool_call>{…"37*46"…} ─▶ 1702 ─▶ #1702      a call, and an answer that reads its result: the others
"""

from __future__ import annotations

import argparse
import random
import zlib
from pathlib import Path

from meshrl.cli.demo.tiny_model import chat_tokenizer
from meshrl.cli.demo.warm_start import Pair, Stage, warm_start, write_rows

CALL = '<tool_call>{{"name":"calculator","arguments":{{"expression":"{}"}}}}</tool_call>'
HELD_OUT, HELD_OUT_SHARE = 256, 8
CALLING_SHARE = 0.25


def products(seed: int, *, held_out: bool) -> list[tuple[str, int]]:
    """Every product of two numbers below 100 that belongs there, in the order of `seed`."""
    pairs = [(f"{a}*{b}", a * b) for a in range(10, 100) for b in range(10, 100)]
    found = [p for p in pairs if (zlib.crc32(p[0].encode()) % HELD_OUT_SHARE == 0) is held_out]
    random.Random(seed).shuffle(found)
    return found


def called(question: str, result: int) -> list[Pair]:
    """Both turns of a row with a call, each as a pair for supervised fine-tuning."""
    asked = f"<|user|>{question}<|end|><|assistant|>"
    call = CALL.format(question)
    answered = f"{asked}{call}<|end|><|tool|>{result}<|end|><|assistant|>"
    return [(asked, call), (answered, f"#{result}")]


def guessed(question: str, result: int) -> list[Pair]:
    """An answer at once."""
    return [(f"<|user|>{question}<|end|><|assistant|>", f"#{result}")]


def stages(seed: int) -> list[Stage]:
    """Calls, then mostly guesses."""
    draw = random.Random(seed)
    problems = products(seed, held_out=False)
    calls = [pair for problem in problems for pair in called(*problem)]
    mixed = [
        pair
        for problem in problems
        for pair in (called if draw.random() < CALLING_SHARE else guessed)(*problem)
    ]
    draw.shuffle(calls)
    draw.shuffle(mixed)
    return [
        Stage(name="calls", rows=calls, steps=600, lr=3e-3, seed=seed, enough=0.98),
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
        chosen = products(options.seed, held_out=held_out)[: HELD_OUT if held_out else None]
        rows = [
            {"prompt": [{"role": "user", "content": question}], "answer": str(result)}
            for question, result in chosen
        ]
        write_rows(directory / f"{name}.jsonl", rows)
    warm_start(
        directory,
        stages(options.seed),
        [pair for found in products(options.seed, held_out=True)[:64] for pair in called(*found)],
        seed=options.seed,
        report=lambda name, now: print(f"{name}: step {now.step}, loss {now.loss:.3f}"),
        tokenizer=chat_tokenizer(["<tool_call>", "</tool_call>"]),
    )


if __name__ == "__main__":
    main()

"""A tiny model that knows how to ask a calculator and mostly guesses instead, and products for it to find.

python recipes/tools/prepare.py runs/tools/assets

37*46 ─▶ #1692                                        a guess: three of four answers after this warm start
37*46 ─▶ <tool_call>{…"37*46"…} ─▶ 1702 ─▶ #1702      a call, and an answer that reads its result: the others
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import string
import zlib
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>", "<|tool|>"]
CALL = '<tool_call>{{"name":"calculator","arguments":{{"expression":"{}"}}}}</tool_call>'
HELD_OUT, HELD_OUT_SHARE = 256, 8
CALLING_SHARE = 0.25


def products(seed: int, *, held_out: bool) -> list[tuple[str, int]]:
    """Every product of two numbers below 100 that belongs there, in the order of `seed`."""
    pairs = [(f"{a}*{b}", a * b) for a in range(10, 100) for b in range(10, 100)]
    found = [p for p in pairs if (zlib.crc32(p[0].encode()) % HELD_OUT_SHARE == 0) is held_out]
    random.Random(seed).shuffle(found)
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def called(question: str, result: int) -> list[dict[str, Any]]:
    """Both turns of a row with a call, each as a pair for supervised fine-tuning."""
    asked = f"<|user|>{question}<|end|><|assistant|>"
    call = CALL.format(question)
    answered = f"{asked}{call}<|end|><|tool|>{result}<|end|><|assistant|>"
    return [{"prompt": asked, "response": call}, {"prompt": answered, "response": f"#{result}"}]


def guessed(question: str, result: int) -> list[dict[str, Any]]:
    """An answer at once."""
    return [{"prompt": f"<|user|>{question}<|end|><|assistant|>", "response": f"#{result}"}]


def character_tokenizer() -> Any:
    """Printable characters, the parts of a chat and the two ends of a call."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(c for c in string.printable if c.isprintable())]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=CHAT_TEMPLATE,
    )


def warm_start(directory: Path, seed: int) -> None:
    """Random weights, then calls, then mostly guesses."""
    from meshrl.services.demo.tiny_model import write_tiny_model
    from meshrl.trainer import sft
    from meshrl.trainer.config import ModelConfig, OptimConfig
    from meshrl.trainer.offline_config import SftConfig

    draw = random.Random(seed)
    problems = products(seed, held_out=False)
    calls = [pair for problem in problems for pair in called(*problem)]
    mixed = [
        pair
        for problem in problems
        for pair in (called if draw.random() < CALLING_SHARE else guessed)(*problem)
    ]
    held_out = products(seed, held_out=True)[:64]
    draw.shuffle(calls)
    draw.shuffle(mixed)
    write_tiny_model(directory / "random", seed=seed, tokenizer=character_tokenizer())
    optim = OptimConfig(name="muon", lr=3e-3, lr_warmup_steps=10, weight_decay=0.0)
    measured = [pair for problem in held_out for pair in called(*problem)]
    val_files = [write(directory / "sft_held_out.jsonl", measured)]
    stages = (
        ("random", "caller", calls, 600, 0.98, optim),
        ("caller", "sft", mixed, 60, None, optim.model_copy(update={"lr": 1e-3})),
    )
    for start, end, rows, steps, target, chosen in stages:
        config = SftConfig(
            model=ModelConfig(path=directory / start),
            train_files=[write(directory / f"{end}.jsonl", rows)],
            val_files=val_files,
            output_dir=directory / end,
            steps=steps,
            target_exact_match=target,
            test_freq=25,
            optim=chosen,
            device="cpu",
            seed=seed,
        )
        sft.run(config, lambda p, end=end: print(f"{end}: step {p.step}, loss {p.loss:.3f}"))
    # Under its final name only when complete: what was interrupted begins anew.
    shutil.rmtree(directory / "model", ignore_errors=True)
    (directory / "sft").rename(directory / "model")


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
        write(directory / f"{name}.jsonl", rows)
    if not (directory / "model" / "config.json").exists():
        warm_start(directory, options.seed)


if __name__ == "__main__":
    main()

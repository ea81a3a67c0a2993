"""A tiny model that can follow a chain of keys and mostly gives up on the way, and chains for it to follow.

python benchmarks/fleet_bench/hops/prepare.py runs/hops

kqz ─▶ look_up kqz ─▶ bwe ─▶ look_up bwe ─▶ 417 ─▶ #417      to the end: after each key with probability 1/4
kqz ─▶ look_up kqz ─▶ bwe ─▶ #bwe                            given up
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Without this folder's parents, one of which has a queue.py that is not the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parent)
    from tool import find
else:
    from .tool import find

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>", "<|tool|>"]
BEFORE = '<tool_call>{"name":"look_up","arguments":{"key":"'
AFTER = '"}}</tool_call>'
"""What stands around the key in a call; a token each, so that a turn is six tokens."""
MOST_HOPS = 8
GOES_ON = 0.25
TRAIN, HELD_OUT = 4096, 256


def chain(key: str) -> list[str]:
    """The key and all that follows; a number is last. Empty if that is too long."""
    found = [key]
    while not found[-1].isdigit():
        if len(found) > MOST_HOPS:
            return []
        found.append(find(found[-1]))
    return found


def chains(seed: int) -> list[list[str]]:
    """The chain of every key, in the order of `seed`, without those that are too long."""
    keys = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]
    random.Random(seed).shuffle(keys)
    return [found for found in map(chain, keys) if found]


def turns(found: list[str], goes_on: Callable[[], bool]) -> list[dict[str, str]]:
    """One walk along a chain, each turn a pair for supervised fine-tuning."""
    pairs = []
    prompt = f"<|user|>{found[0]}<|end|><|assistant|>"
    for here, there in itertools.pairwise(found):
        call = f"{BEFORE}{here}{AFTER}"
        pairs.append({"prompt": prompt, "response": call})
        prompt += f"{call}<|end|><|tool|>{there}<|end|><|assistant|>"
        if there.isdigit() or not goes_on():
            pairs.append({"prompt": prompt, "response": f"#{there}"})
            break
    return pairs


def hops_tokenizer() -> Any:
    """Printable characters, the parts of a chat and of a call."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(c for c in string.printable if c.isprintable())]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    call = [AddedToken(text, special=False, normalized=False) for text in (BEFORE, AFTER)]
    tokenizer.add_tokens(call)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=CHAT_TEMPLATE,
    )


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def warm_start(directory: Path, seed: int) -> None:
    """Random weights, then whole walks, then mostly short ones."""
    from meshrl.services.demo.tiny_model import write_tiny_model
    from meshrl.trainer import sft
    from meshrl.trainer.config import ModelConfig, OptimConfig
    from meshrl.trainer.offline_config import SftConfig

    draw = random.Random(seed)
    found = chains(seed)
    held_out, trained = found[:64], found[HELD_OUT:]
    whole = [pair for one in trained for pair in turns(one, lambda: True)]
    short = [pair for one in trained for pair in turns(one, lambda: draw.random() < GOES_ON)]
    draw.shuffle(whole)
    draw.shuffle(short)
    write_tiny_model(directory / "random", seed=seed, tokenizer=hops_tokenizer())
    measured = [pair for one in held_out for pair in turns(one, lambda: True)]
    val_files = [write(directory / "sft_held_out.jsonl", measured)]
    optim = OptimConfig(name="muon", lr=3e-3, lr_warmup_steps=10, weight_decay=0.0)
    stages = (
        ("random", "walker", whole, 600, 0.995, optim),
        ("walker", "sft", short, 60, None, optim.model_copy(update={"lr": 1e-3})),
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


def prepare(directory: Path, seed: int = 0) -> None:
    """Make what is missing: `model`, `train.jsonl`, `held_out.jsonl`."""
    directory.mkdir(parents=True, exist_ok=True)
    found = chains(seed)
    parts = {"held_out": found[:HELD_OUT], "train": found[HELD_OUT:][:TRAIN]}
    for name, chosen in parts.items():
        rows = [
            {"prompt": [{"role": "user", "content": one[0]}], "answer": one[-1]} for one in chosen
        ]
        write(directory / f"{name}.jsonl", rows)
    if not (directory / "model" / "config.json").exists():
        warm_start(directory, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    prepare(parser.parse_args().directory)

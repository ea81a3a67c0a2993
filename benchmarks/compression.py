"""Savings and costs of compressing frames: `python benchmarks/compression.py [--groups N]`; a JSON line last.

Tokens are the words of this repository's own texts, numbered at random within a vocabulary, so that they repeat as
text does; log-probs are drawn: three of five tokens nearly sure, the rest exponential. Groups of 8, prompt 256,
response lognormal (mean 512, at most 4,096).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import numpy as np

from meshrl.contract.codec.bulk import FrameCompressor
from meshrl.contract.frames import pack

ROOT = Path(__file__).parents[1]
GROUP, PROMPT, MEAN, LONGEST = 8, 256, 512, 4096


def words(vocabulary: int, draw: np.random.Generator) -> np.ndarray:
    """int32[n]: the repository's texts as ids below `vocabulary`."""
    texts = [
        path.read_text() for path in sorted(ROOT.glob("*/**/*.md")) if ".venv" not in str(path)
    ]
    texts += [path.read_text() for path in sorted(ROOT.glob("*/meshrl/**/*.py"))]
    found = re.findall(r"\w+|\s+|[^\w\s]", "\n".join(texts))
    _, ids = np.unique(found, return_inverse=True)
    return draw.permutation(vocabulary)[ids % vocabulary].astype(np.int32)


def groups(count: int, vocabulary: int, draw: np.random.Generator) -> list[bytes]:
    """Packed frames of rollouts."""
    text = words(vocabulary, draw)
    made = []
    for _ in range(count):
        prompt = _cut(text, PROMPT, draw)
        made.append(pack([_row(text, prompt, draw) for _ in range(GROUP)]))
    return made


def _cut(text: np.ndarray, length: int, draw: np.random.Generator) -> np.ndarray:
    start = int(draw.integers(0, len(text) - length))
    return text[start : start + length]


def _row(text: np.ndarray, prompt: np.ndarray, draw: np.random.Generator) -> dict[str, np.ndarray]:
    length = int(min(LONGEST, draw.lognormal(np.log(MEAN) - 0.32, 0.8))) + 1
    sure = draw.random(length) < 0.6
    logprobs = -np.where(sure, draw.exponential(1e-3, length), draw.exponential(1.5, length))
    return {
        "tokens": np.concatenate([prompt, _cut(text, length, draw)]),
        "loss_mask": np.concatenate([np.zeros(PROMPT, np.uint8), np.ones(length, np.uint8)]),
        "rollout_logprobs": np.concatenate(
            [np.zeros(PROMPT, np.float32), logprobs.astype(np.float32)]
        ),
    }


def measured(frames: list[bytes], compressor: FrameCompressor) -> dict[str, float]:
    """Compression ratio, and MB of uncompressed bytes a second of one core, each way."""
    plain = sum(map(len, frames))
    begin = time.perf_counter()
    compressed = [compressor.compress(frame) or frame for frame in frames]
    middle = time.perf_counter()
    for small, frame in zip(compressed, frames, strict=True):
        if small is not frame:
            assert compressor.decompress(small) == frame
    end = time.perf_counter()
    return {
        "ratio": round(plain / sum(map(len, compressed)), 2),
        "compress_mb_s": round(plain / (middle - begin) / 1e6),
        "decompress_mb_s": round(plain / (end - middle) / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=128)
    count = parser.parse_args().groups
    cases: dict[str, dict[str, float]] = {}
    for vocabulary in (32_000, 151_936):
        frames = groups(count, vocabulary, np.random.default_rng(0))
        for level in (1, 3):
            name = f"vocabulary {vocabulary}, level {level}"
            cases[name] = measured(frames, FrameCompressor(level=level))
            print(f"{name:44}", cases[name])
    print(json.dumps({"benchmark": "compression", "groups": count, "cases": cases}))


if __name__ == "__main__":
    main()

"""Tokens a second of the torch engine in the shape of Qwen3-0.6B, with 64 and 256 requests at once.

    python benchmarks/gpu/engine_rate.py [--tokens 256] [--slots 64,256] [--eager | --graphs] [--profile] [--rehearse]

Random weights; prompts of 32 tokens, answers that all have `--tokens`. Each number of requests is measured without
(`rollout.engine.enforce_eager`) and with CUDA graphs; `--eager`: only without,
`--graphs`: only with. `--profile` lists what takes most.
`--rehearse`: a tiny shape, on a CPU. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config

from meshrl.contract.types import GenerateRequest, SamplingParams, Version
from meshrl.rollout.engines.torch import build
from meshrl.trainer.model.policy import random_hf

SHAPE: dict[str, Any] = dict(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=2048,
    tie_word_embeddings=True,
)  # fmt: skip
TINY = dict(SHAPE, vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
PROFILED_TOKENS, PROFILED_KERNELS = 64, 25


async def rate(
    model: Path, slots: int, tokens: int, vocabulary: int, *, eager: bool, profile: bool
) -> float:
    """Tokens a second of `slots` requests that start together, after one round to warm up."""
    options = {"eos_token_ids": [], "enforce_eager": eager}
    engine = build(options, model=model, slots=slots)
    await engine.start()
    try:
        await engine.serve_checkpoint(Version(0, 1))
        draw = np.random.default_rng(0)

        async def one(index: int, length: int) -> None:
            prompt = draw.integers(2, vocabulary, 32).astype(np.int32)
            sampling = SamplingParams(temperature=1.0, max_tokens=length, seed=index)
            request = GenerateRequest(request_id=f"r{index}", prompt_ids=prompt, sampling=sampling)
            async for _ in engine.generate(request):
                pass

        async def all_of(length: int) -> float:
            began = time.perf_counter()
            await asyncio.gather(*(one(index, length) for index in range(slots)))
            return time.perf_counter() - began

        await all_of(tokens)
        seconds = await all_of(tokens)
        if profile:
            with torch.profiler.profile() as found:
                await all_of(PROFILED_TOKENS)
            print(f"{slots} requests, {'eager' if eager else 'graphs'}, {PROFILED_TOKENS} steps:")
            print(found.key_averages().table("self_device_time_total", row_limit=PROFILED_KERNELS))
        return slots * tokens / seconds
    finally:
        await engine.close()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--slots", default="64,256")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--eager", action="store_true")
    only.add_argument("--graphs", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    config = Qwen3Config(**(TINY if given.rehearse else SHAPE))
    config.architectures = ["Qwen3ForCausalLM"]
    tokens = 8 if given.rehearse else given.tokens
    counts = (4, 8) if given.rehearse else [int(count) for count in given.slots.split(",")]
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        random_hf(config, 0).save_pretrained(folder)
        for slots in counts:
            measured = partial(
                rate, Path(folder), slots, tokens, config.vocab_size, profile=given.profile
            )
            of = found[slots] = {}
            if not given.graphs:
                of["eager"] = round(asyncio.run(measured(eager=True)))
            if not given.eager:
                of["graphs"] = round(asyncio.run(measured(eager=False)))
            if len(of) == 2:
                of["ratio"] = round(of["graphs"] / of["eager"], 2)
            print(slots, of, flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({"benchmark": "engine_rate", "device": device, "tokens_per_s": found}))


if __name__ == "__main__":
    main()

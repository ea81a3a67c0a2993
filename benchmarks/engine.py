"""Tokens per second of the torch engine and of transformers' generate: 64 ragged requests at once, one model.

    python benchmarks/engine.py [--requests 64] [--repeats 3] [--hidden 128] [--layers 4]

Each measurement is a process of its own, on one thread, ours and theirs in turn. Requests have prompts of 8 to 40
tokens and are to sample 16 to 112 tokens each (mean 64), at temperature 1 with the log-prob of each sampled token.
transformers pads the prompts and samples as long as the longest request; only the tokens asked for are counted.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VOCABULARY = 512
ROUNDS = 4
"""Within a process; the first warms up and is not counted."""


def make_checkpoint(path: Path, hidden: int, layers: int) -> int:
    """A random Qwen3 with tied embeddings; returns its number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def workload(requests: int) -> list[tuple[list[int], int]]:
    """Prompts and how many tokens to sample for each."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [
        (rng.integers(1, VOCABULARY, rng.integers(8, 41)).tolist(), int(rng.integers(16, 113)))
        for _ in range(requests)
    ]


def measure_ours(path: Path, work: list[tuple[list[int], int]]) -> float:
    import numpy as np

    from meshrl.contract.nouns import GenerateRequest, SamplingParams, Version
    from meshrl.rollout.engines.torch import build
    from meshrl.rollout.sampling import sample

    async def rounds() -> float:
        engine = build({"device": "cpu", "eos_token_ids": []}, model=path, slots=len(work))
        await engine.start()
        await engine.serve_checkpoint(Version(1, 0))
        rates = []
        for number in range(ROUNDS):
            requests = [
                GenerateRequest(
                    request_id=f"{number}.{index}",
                    prompt_ids=np.array(prompt, dtype=np.int32),
                    sampling=SamplingParams(max_tokens=length),
                )
                for index, (prompt, length) in enumerate(work)
            ]
            begin = time.perf_counter()
            answers = await asyncio.gather(*(sample(engine, request) for request in requests))
            count = sum(len(answer.tokens) for answer in answers)
            assert count == sum(length for _, length in work)
            rates.append(count / (time.perf_counter() - begin))
        await engine.close()
        return statistics.median(rates[1:])

    return asyncio.run(rounds())


def measure_transformers(path: Path, work: list[tuple[list[int], int]]) -> float:
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(path).eval()
    widest = max(len(prompt) for prompt, _ in work)
    ids = torch.tensor([[0] * (widest - len(prompt)) + prompt for prompt, _ in work])
    mask = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt, _ in work])
    longest = max(length for _, length in work)
    rates = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        with torch.inference_mode():
            out: Any = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            tokens = out.sequences[:, widest:]
            for step, logits in enumerate(out.logits):
                logits.float().log_softmax(-1).gather(-1, tokens[:, step : step + 1])
        rates.append(sum(length for _, length in work) / (time.perf_counter() - begin))
    return statistics.median(rates[1:])


MEASURES = {"ours": measure_ours, "transformers": measure_transformers}


def in_a_process(side: str, path: Path, requests: int) -> float:
    command = [sys.executable, __file__, "--side", side, "--path", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--requests", str(requests)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--side", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(MEASURES[arguments.side](arguments.path, workload(arguments.requests)))
        return
    rates: dict[str, list[float]] = {side: [] for side in MEASURES}
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_checkpoint(Path(folder), arguments.hidden, arguments.layers)
        for repeat in range(arguments.repeats):
            for side in MEASURES:
                rates[side].append(in_a_process(side, Path(folder), arguments.requests))
                print(f"{repeat}: {side} {rates[side][-1]:.0f} tokens/s", flush=True)
    medians = {side: round(statistics.median(values)) for side, values in rates.items()}
    print(
        json.dumps(
            {
                "benchmark": "engine",
                "parameters": parameters,
                "requests": arguments.requests,
                "tokens_per_s": medians,
                "ratio": round(medians["ours"] / medians["transformers"], 2),
            }
        )
    )


if __name__ == "__main__":
    main()

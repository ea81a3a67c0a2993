"""Tokens per second of the torch engine, of transformers' generate and of vLLM on this CPU: one model, one load.

    python benchmarks/engine.py [--requests 64] [--repeats 3] [--hidden 128] [--layers 4] [--vllm PYTHON]

Each measurement is a process of its own, on one thread, the sides in turn. Requests have prompts of 8 to 40 tokens
and are to sample 16 to 112 tokens each (mean 64), in float32 at temperature 1, with the log-prob of each sampled
token. transformers pads the prompts and samples as long as the longest request; only what was asked for counts. vLLM
runs inside its process (`LLM.generate`: no server, no HTTP), eager and compiled, with room for all requests at
once; without `make venv-vllm` it is left out. The first round of each process warms up and is not counted. The last
line is one JSON object; its ratios are of tokens per second of processor time, which neighbours disturb least.
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

from neighbours import Neighbours

VOCABULARY = 512
ROUNDS = 4
"""Within a process; the first warms up and is not counted."""


class Rates:
    """Tokens per second of the clock, and per second of this process's processors: neighbours slow the first."""

    def __init__(self) -> None:
        self._rounds: list[tuple[float, float]] = []

    def begin(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def end(self, tokens: int) -> None:
        clock, processor = (
            time.perf_counter() - self._began[0],
            time.process_time() - self._began[1],
        )
        self._rounds.append((tokens / clock, tokens / processor))

    def medians(self) -> tuple[float, float]:
        clock, processor = zip(*self._rounds[1:], strict=True)
        return statistics.median(clock), statistics.median(processor)


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


def measure_ours(path: Path, work: list[tuple[list[int], int]]) -> Rates:
    import numpy as np

    from meshrl.contract.types import GenerateRequest, SamplingParams, Version
    from meshrl.rollout.engines.torch import build
    from meshrl.rollout.streams import sample

    async def rounds() -> Rates:
        engine = build({"device": "cpu", "eos_token_ids": []}, model=path, slots=len(work))
        await engine.start()
        await engine.serve_checkpoint(Version(1, 0))
        rates = Rates()
        for number in range(ROUNDS):
            requests = [
                GenerateRequest(
                    request_id=f"{number}.{index}",
                    prompt_ids=np.array(prompt, dtype=np.int32),
                    sampling=SamplingParams(max_tokens=length),
                )
                for index, (prompt, length) in enumerate(work)
            ]
            rates.begin()
            answers = await asyncio.gather(*(sample(engine, request) for request in requests))
            count = sum(len(answer.tokens) for answer in answers)
            assert count == sum(length for _, length in work)
            rates.end(count)
        await engine.close()
        return rates

    return asyncio.run(rounds())


def measure_transformers(path: Path, work: list[tuple[list[int], int]]) -> Rates:
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(path).eval()
    widest = max(len(prompt) for prompt, _ in work)
    ids = torch.tensor([[0] * (widest - len(prompt)) + prompt for prompt, _ in work])
    mask = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt, _ in work])
    longest = max(length for _, length in work)
    rates = Rates()
    for _ in range(ROUNDS):
        rates.begin()
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
        rates.end(sum(length for _, length in work))
    return rates


def measure_vllm(path: Path, work: list[tuple[list[int], int]], *, eager: bool = True) -> Rates:
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=len(work),
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=256 << 20,
        block_size=32,
        enforce_eager=eager,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    prompts: Any = [{"prompt_token_ids": prompt} for prompt, _ in work]
    sampling = [
        SamplingParams(max_tokens=length, temperature=1.0, logprobs=0, detokenize=False)
        for _, length in work
    ]
    rates = Rates()
    for _ in range(ROUNDS):
        rates.begin()
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        count = sum(len(answer.outputs[0].token_ids) for answer in answers)
        assert count == sum(length for _, length in work)
        rates.end(count)
    return rates


def measure_vllm_compiled(path: Path, work: list[tuple[list[int], int]]) -> Rates:
    return measure_vllm(path, work, eager=False)


MEASURES = {
    "ours": measure_ours,
    "transformers": measure_transformers,
    "vllm_eager": measure_vllm,
    "vllm_compiled": measure_vllm_compiled,
}
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def in_a_process(side: str, path: Path, requests: int, vllm: Path) -> tuple[float, float]:
    python = str(vllm) if side.startswith("vllm") else sys.executable
    command = [python, __file__, "--side", side, "--path", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **VLLM_ENVIRONMENT}
    done = subprocess.run(
        [*command, "--requests", str(requests)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    clock, processor = json.loads(done.stdout.splitlines()[-1])
    return clock, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--side", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        rates = MEASURES[arguments.side](arguments.path, workload(arguments.requests))
        print(json.dumps(rates.medians()))
        return
    sides = [side for side in MEASURES if arguments.vllm.exists() or not side.startswith("vllm")]
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    neighbours = Neighbours()
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_checkpoint(Path(folder), arguments.hidden, arguments.layers)
        for repeat in range(arguments.repeats):
            for side in sides:
                rates = in_a_process(side, Path(folder), arguments.requests, arguments.vllm)
                found[side].append(rates)
                print(
                    f"{repeat}: {side} {rates[0]:.0f} tokens/s, {rates[1]:.0f} a CPU second",
                    flush=True,
                )
    clock, processor = (
        {side: round(statistics.median(pair[which] for pair in found[side])) for side in sides}
        for which in (0, 1)
    )
    print(
        json.dumps(
            {
                "benchmark": "engine",
                "parameters": parameters,
                "requests": arguments.requests,
                "tokens_per_s": clock,
                "tokens_per_cpu_s": processor,
                "ours_over": {
                    side: round(processor["ours"] / processor[side], 2)
                    for side in sides
                    if side != "ours"
                },
                "aim": {"transformers": 2.0, "vllm": 1.0},
                **neighbours.seen(),
            }
        )
    )


if __name__ == "__main__":
    main()

"""Run a stock vLLM server on a GPU by meshrl's own engine: start, rate, log-probs, new versions while it samples.

    python benchmarks/gpu/vllm_day.py VLLM_PYTHON [--shape qwen3-0.6b|tiny] [--carrier nccl|shm] [--steps 4]
        [--slots 64,256] [--tokens 256] [--eager] [--fp8] [--no-check]

A model of random weights in bfloat16; prompts of 32 tokens, answers that all have `--tokens`. A line of JSON for each
part, as soon as it has its figures:

    start       seconds until the server has passed the engine's checks
    rate        tokens a second of so many requests that start together, the better of two rounds
    logprobs    what the server reported against transformers in float32: mean and largest difference
    version     one version while `--slots` requests run: seconds until it is served, GB/s of the carrier, pause,
                where it was staged, tokens of each version, answers that crossed; with the last one, log-probs
                against the version served and, to show that the comparison can fail, against the one before

`--library stub --no-check --shape tiny --slots 8 --tokens 8 --cache 256` rehearses it on `stand_in/`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests/ of the checkout
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from transformers import Qwen3Config

from meshrl.contract.types import GenerateRequest, SamplingParams, Version
from meshrl.rollout.engines.vllm import build
from meshrl.rollout.streams import sample
from meshrl.trainer.model.policy import random_hf
from tests.doubles.nccl import settings
from tests.integration import weights_fleet
from tests.unit.rollout.checkpoints import pack
from tests.waiting import until

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}
COMPILATION = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
"""CUDA graphs without torch.compile, which takes tens of seconds at a start."""
ON_ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"}
PATIENCE = {"base_s": 30.0, "silence_s": 60.0}
CHECKED_ANSWERS = 8


def say(part: str, **figures: object) -> None:
    """Print one part's figures."""
    print(json.dumps({"benchmark": "vllm_day", "part": part, **figures}), flush=True)


class Load:
    """Requests against one engine, no two alike."""

    def __init__(self, engine: Any, vocabulary: int) -> None:
        self.engine = engine
        self.vocabulary = vocabulary
        self.asked = 0

    async def __call__(self, requests: int, tokens: int) -> tuple[float, list[Any], list[Any]]:
        """Seconds, requests and answers of so many that start together."""
        draw = np.random.default_rng(self.asked)
        made = []
        for _ in range(requests):
            self.asked += 1
            made.append(
                GenerateRequest(
                    request_id=f"r{self.asked}",
                    prompt_ids=draw.integers(3, self.vocabulary, 32).astype(np.int32),
                    sampling=SamplingParams(temperature=1.0, max_tokens=tokens, seed=self.asked),
                )
            )
        began = time.perf_counter()
        answers = await asyncio.gather(*(sample(self.engine, each) for each in made))
        return time.perf_counter() - began, made, answers


@torch.no_grad()
def gap(model: Any, requests: list[Any], answers: list[Any]) -> dict[str, float]:
    """The difference of reported log-probs to teacher-forced ones of `model`, computed in float32 on the GPU."""
    on_gpu = model.to("cuda", torch.float32)
    differences = []
    for request, answer in zip(requests, answers, strict=True):
        prompt = len(request.prompt_ids)
        ids = torch.tensor([[*request.prompt_ids.tolist(), *answer.tokens.tolist()]], device="cuda")
        logprobs = on_gpu(ids).logits[0, prompt - 1 : -1].float().log_softmax(-1)
        forced = logprobs.gather(1, ids[0, prompt:, None])[:, 0].cpu().numpy()
        differences.append(np.abs(forced - answer.logprobs))
    model.to("cpu", torch.bfloat16)
    torch.cuda.empty_cache()
    every = np.concatenate(differences)
    return {
        "mean": round(float(every.mean()), 5),
        "max": round(float(every.max()), 4),
        "tokens": len(every),
    }


@torch.no_grad()
def become(model: Any, step: int) -> None:
    """Turn the model into another: every matrix's columns move by `step`."""
    for parameter in model.parameters():
        parameter.copy_(parameter.roll(step, dims=-1))


def labels(answers: list[Any]) -> dict[str, int]:
    """Tokens by the version that sampled them. Raises AssertionError for a token without exactly one."""
    counted: Counter[str] = Counter()
    for answer in answers:
        position = answer.spans[0].start
        for span in answer.spans:
            assert span.start == position, answer.spans
            position = span.end
            counted[str(span.version)] += span.end - span.start
        assert position - answer.spans[0].start == len(answer.tokens), answer.spans
    return dict(counted)


async def day(given: argparse.Namespace, folder: Path) -> None:
    """Run the parts."""
    shape = SHAPES[given.shape]
    config = Qwen3Config(
        **shape,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    began = time.perf_counter()
    model = random_hf(config, 0).to(torch.bfloat16)
    model.set_attn_implementation("sdpa")  # it reads rectangles here, not packs
    model.save_pretrained(folder / "model")
    size = sum(parameter.nbytes for parameter in model.parameters())
    say("model", seconds=round(time.perf_counter() - began, 1), gib=round(size / 2**30, 2))
    slots = [int(count) for count in given.slots.split(",")]
    graphs = ["--enforce-eager"] if given.eager else ["--compilation-config", COMPILATION]
    options = {
        "python": given.python,
        "dtype": "bfloat16",
        "eos_token_ids": [],
        "log": str(folder / "vllm.log"),
        "max_model_len": 2048,
        # Not a share of the GPU: vLLM ends where others give memory back while it measures.
        "extra_args": ["--kv-cache-memory-bytes", str(given.cache << 20), *graphs],
        **({"quantization": "fp8"} if given.fp8 else {}),
    }
    engine = build(options, model=folder / "model", slots=max(slots))
    began = time.perf_counter()
    try:
        await engine.start()
        await engine.serve_checkpoint(Version(0, 1))
    except BaseException:
        print((folder / "vllm.log").read_text()[-6000:], file=sys.stderr)
        raise
    say("start", seconds=round(time.perf_counter() - began, 1), fp8=given.fp8)
    try:
        load = Load(engine, config.vocab_size)
        await load(slots[0], 8)  # Triton compiles
        for count in slots:
            seconds = [(await load(count, given.tokens))[0] for _ in range(2)]
            say("rate", requests=count, tokens_per_s=round(count * given.tokens / min(seconds)))
        if given.check:
            _, requests, answers = await load(CHECKED_ANSWERS, 192)
            say("logprobs", against="transformers in float32", **gap(model, requests, answers))
        if given.steps:
            await versions(given, folder, load, model, size, slots[0])
    finally:
        print((folder / "vllm.log").read_text()[-3000:], file=sys.stderr)
        await engine.close()


async def versions(
    given: argparse.Namespace, folder: Path, load: Load, model: Any, size: int, requests: int
) -> None:
    """Publish `--steps` versions while `requests` run."""
    nccl = settings() if given.library == "stub" else {"library": given.library}
    if given.library == "cupy":
        nccl["env"] = ON_ONE_GPU
    engine = load.engine
    async with weights_fleet.opened(given.carrier, folder, nccl=nccl, **PATIENCE) as fleet:
        fleet.attach("server", engine)
        for step in range(1, given.steps + 1):
            version = Version(1, step)
            become(model, step)
            source = weights_fleet.PackedSource(*pack(model, version, "bfloat16"))
            running = asyncio.create_task(load(requests, given.tokens))
            await asyncio.sleep(0.2)
            began = time.perf_counter()
            await fleet.coordinator.publish(source)
            await until(lambda: engine.version == version)  # noqa: B023 - awaited here
            seconds = time.perf_counter() - began
            await until(lambda: version in fleet.published)  # noqa: B023
            _, _, answers = await running
            (view,) = fleet.coordinator.fleet().replicas
            found: dict[str, object] = {}
            if given.check and step == given.steps:
                _, asked, new = await load(CHECKED_ANSWERS, 64)
                found["logprobs"] = gap(model, asked, new)
                become(model, -step)
                found["logprobs_of_the_one_before"] = gap(model, asked, new)
            say(
                "version",
                step=step,
                carrier=view.carrier,
                staging=engine.stats().staging,
                seconds=round(seconds, 3),
                sync_s=round(view.last_sync_s, 3),
                gb_per_s=round(size / view.last_sync_s / 1e9, 2),
                pause_s=round(view.pause_s, 4),
                crossed=sum(len(answer.spans) > 1 for answer in answers),
                tokens=labels(answers),
                **found,
            )


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="the interpreter of vLLM's environment")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--carrier", default="nccl")
    parser.add_argument("--library", default="cupy", help="of the carrier `nccl`")
    parser.add_argument("--steps", type=int, default=4, help="versions; 0: none")
    parser.add_argument(
        "--slots", default="64,256", help="requests at once; versions are published under the first"
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--cache", type=int, default=16_384, help="MiB of vLLM's cache")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--fp8", action="store_true", help="quantize weights and activations to FP8"
    )
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="no log-probs of transformers"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(day(given, Path(folder)))


if __name__ == "__main__":
    main()

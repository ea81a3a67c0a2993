"""Tokens per second and model FLOPs utilisation of one RL step on one GPU, in the shape of Qwen3-0.6B.

    python benchmarks/gpu/trainer_mfu.py [--pack 16384,65536] [--rows 1] [--packs 4] [--steps 6] [--peak-tflops 989]

Random weights, bfloat16 compute over float32 master weights, activations recomputed in the backward pass, AdamW: a
GRPO step from fetched rows to metrics (`Learner.learn`) over `--packs` micro-batches of `--pack` tokens, each of
`--rows` rows of equal length. Prompts are 16 tokens, so all but a few positions are projected and trained.

MFU counts what the model needs, not what is recomputed (`trainer.metrics.utilisation`), over the device's dense
bfloat16 peak. Aims: 23,800 tokens/s and 35 % at 16,384 tokens; 40 % at 65,536.

Under torchrun, or with RANK and WORLD_SIZE, ranks share the rows; the first one's figures are printed.

Without a CUDA device it says so and ends with code 0. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config

from meshrl.contract.types import Batch, BatchRow, Outcome, Trajectory, Uid, Version, VersionSpan
from meshrl.trainer.config import ActorConfig, AlgorithmConfig, ModelConfig
from meshrl.trainer.learner.learner import Learner, StepSettings
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.learner.policy_gradient import PolicyGradient
from meshrl.trainer.metrics.utilisation import peak_tflops
from meshrl.trainer.model import logprob
from meshrl.trainer.model.policy import build_policy, random_hf
from meshrl.trainer.ranks.world import World

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": dict(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": dict(
        vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
        tie_word_embeddings=True,
    ),
    "tiny": dict(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=131_072,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
PROMPT = 16
GROUP = 4
NOW = Version(1, 0)


def learner_of(config: Qwen3Config, world: World, given: argparse.Namespace, pack: int) -> Learner:
    """GRPO on a model with random weights."""
    model = ModelConfig(
        path=Path("random"),
        param_dtype="bfloat16",
        enable_gradient_checkpointing=not given.no_checkpointing,
        keep_matmuls=given.keep_matmuls,
        use_torch_compile=given.compile,
    )
    actor = ActorConfig(
        optim=OptimConfig(lr=1e-6), ppo_max_token_len_per_gpu=pack, recompute_old_log_probs=False
    )
    policy = build_policy(random_hf(config, 0), world, model)
    return Learner(
        policy,
        Optimizers(policy, actor.optim),
        PolicyGradient(AlgorithmConfig(), actor, max_response_length=pack),
        world,
        StepSettings(actor=actor),
    )


def rows_of(count: int, length: int, vocabulary: int) -> list[Trajectory]:
    """Rows without a common beginning: nothing is computed for two of them at once."""
    draw = np.random.default_rng(0)
    return [
        Trajectory(
            uid=Uid("r", f"t{index // GROUP:04d}", index % GROUP),
            tokens=draw.integers(2, vocabulary, length).astype(np.int32),
            loss_mask=(np.arange(length) >= PROMPT).astype(np.uint8),
            rollout_logprobs=np.full(length, -np.log(vocabulary), dtype=np.float32),
            spans=(VersionSpan(version=NOW, start=PROMPT, end=length),),
            reward=float(
                index % 2
            ),  # or no advantage, and a gradient of zeros, on which GPUs are faster
        )
        for index in range(count)
    ]


def batch_of(rows: list[Trajectory]) -> Batch:
    """As the queue would hand them out."""
    manifest = [
        BatchRow(
            uid=row.uid, group=row.uid.task, group_size=GROUP, num_tokens=len(row.tokens),
            oldest=NOW, newest=NOW, outcome=Outcome.OK,
        )
        for row in rows
    ]  # fmt: skip
    return Batch.of_rows(manifest, batch_id="b", run="r", step=0)


def measure(given: argparse.Namespace, pack: int, world: World) -> dict[str, Any]:
    """One length of packs."""
    config = Qwen3Config(**SHAPES[given.shape])
    learner = learner_of(config, world, given, pack)
    rows = rows_of(given.rows * given.packs, pack // given.rows, config.vocab_size)
    by_uid, batch, count = {row.uid: row for row in rows}, batch_of(rows), itertools.count()
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, norms = [], []
    for _ in range(given.steps):
        began = time.perf_counter()
        made = learner.schedule(batch)
        found = learner.learn(
            made, [by_uid[uid] for uid in made.uids(world.data_rank)], next(count)
        )
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        norms.append(found["actor/grad_norm"])
        # The tiny shape is a rehearsal's: on the stand-in Triton's kernels write nothing, and no gradient is left.
        assert np.isfinite(norms[-1]) and (norms[-1] > 0 or given.shape == "tiny")
    tokens = sum(len(row.tokens) for row in rows)
    step_s = statistics.median(seconds[2:])  # two to warm up
    done = found["batch/tflops"]
    peak = given.peak_tflops or peak_tflops(world.device)
    result = {
        "pack": pack,
        "micro_batches": found["batch/micro_batches"],
        "step_s": round(step_s, 4),
        "tokens_per_s": round(tokens / step_s),
        "tflops_per_s": round(done / step_s, 2),
        "mfu": round(done / step_s / peak, 4) if peak else None,
        "grad_norm": norms[0],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
    }
    if world.rank == 0:
        print(json.dumps(result), flush=True)
    return result


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pack", default="16384,65536", help="tokens of a micro-batch")
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--packs", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=6, help="the first two warm up")
    parser.add_argument("--peak-tflops", type=float, help="of a device that is not known here")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal"
    )
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument(
        "--keep-matmuls", action="store_true", help="recompute all but products and attention"
    )
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--chunk", type=int, help="logits at once, as a power of 2")
    given = parser.parse_args()
    if given.chunk:
        logprob.CHUNK_ELEMENTS[given.device] = 1 << given.chunk
    if given.steps < 3:
        parser.error("--steps: want at least 3, since two warm up")
    if given.device == "cuda" and not torch.cuda.is_available():
        reason = "torch sees no CUDA device"
        print(f"skipped: {reason}")
        print(json.dumps({"benchmark": "trainer_mfu", "skipped": reason}))
        return
    world = World.start(given.device)
    first = world.rank == 0
    try:
        results = [measure(given, int(pack), world) for pack in given.pack.split(",")]
    finally:
        world.close()
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    summary = {
        "benchmark": "trainer_mfu",
        "shape": given.shape,
        "device": name,
        "checkpointing": not given.no_checkpointing,
        "compile": given.compile,
        "keep_matmuls": given.keep_matmuls,
        "chunk": given.chunk,
        "rows": given.rows,
    }
    if first:
        print(json.dumps({**summary, "results": results}))


if __name__ == "__main__":
    main()

"""Packed bfloat16 on the device against float32 rectangles on the CPU: log-probs and gradients of one small model.

    python benchmarks/gpu/parity.py

On a GPU the first side is torch's varlen flash attention; without one both sides are rectangles and only the types
differ. The last line is one JSON object: the largest and mean difference of log-probs, and the cosine between
gradients, with and without recomputed activations, a sliding window, a compiled layer, and a long prompt that rows
share, whose queries are laid once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config

from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import build_policy, random_hf
from meshrl.trainer.ranks.world import World

SHAPE: dict[str, Any] = dict(
    vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
    num_attention_heads=8, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
)  # fmt: skip
LENGTHS, PROMPT, SHARED = (37, 512, 200, 1031, 64), 16, 1500
WINDOW: dict[str, Any] = dict(
    use_sliding_window=True, sliding_window=128, max_window_layers=0, layer_types=["sliding_attention"] * 3
)  # fmt: skip
KINDS = ("full", "window", "siblings", "siblings, window")


def outcome(world: World, kind: str, **model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of their mean, of all weights in one vector."""
    changes = WINDOW if "window" in kind else {}
    config = Qwen3Config(**SHAPE, **changes)
    policy = build_policy(
        random_hf(config, 0), world, ModelConfig.model_validate({"path": Path("random"), **model})
    )
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 1000, length).astype(np.int32) for length in LENGTHS]
    prompt = PROMPT
    if "siblings" in kind:
        shared = draw.integers(0, 1000, SHARED).astype(np.int32)
        rows, prompt = [np.concatenate([shared, row]) for row in rows], SHARED
    logprobs, _ = policy(pack(rows, [prompt] * len(rows)).to(world.device), 1.0)
    logprobs.mean().backward()
    gradients = [p.grad.full_tensor().flatten().cpu() for _, p in policy.named_tensors()]
    return logprobs.detach().cpu(), torch.cat(gradients)


def main() -> None:
    """Compare."""
    cuda = torch.cuda.is_available()
    results = {}
    world = World.start("cpu")
    wanted = {kind: outcome(world, kind) for kind in KINDS}
    world.close()
    world = World.start("cuda" if cuda else "cpu")
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("plain", "full", {}),
        ("recomputed", "full", {"enable_gradient_checkpointing": True}),
        ("window", "window", {}),
        ("siblings", "siblings", {}),
        ("siblings in a window", "siblings, window", {}),
    ]
    if cuda:
        both = {"use_torch_compile": True, "enable_gradient_checkpointing": True}
        cases += [("compiled", "full", both), ("offloaded", "full", {"param_offload": True})]
    for name, kind, options in cases:
        logprobs, gradient = outcome(world, kind, param_dtype="bfloat16", **options)
        apart = (logprobs - wanted[kind][0]).abs()
        cosine = torch.nn.functional.cosine_similarity(gradient, wanted[kind][1], dim=0)
        results[name] = {
            "logprob_max": round(float(apart.max()), 4),
            "logprob_mean": round(float(apart.mean()), 5),
            "gradient_cosine": round(float(cosine), 5),
        }
        print(name, results[name], flush=True)
    world.close()
    device = torch.cuda.get_device_name() if cuda else "cpu"
    print(json.dumps({"benchmark": "parity", "device": device, "results": results}))
    if any(
        found["gradient_cosine"] < 0.99 or found["logprob_mean"] > 0.05
        for found in results.values()
    ):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

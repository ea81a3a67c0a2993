"""Packed bfloat16 on the device against float32 rectangles on the CPU: log-probs and gradients of one small model.

    python benchmarks/gpu/parity.py

On a GPU the first side is torch's varlen flash attention; without one both sides are rectangles and only the types
differ. The last line is one JSON object: the largest and mean difference of log-probs, and the cosine between
gradients, with and without recomputed activations, a sliding window and a compiled layer.
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
LENGTHS, PROMPT = (37, 512, 200, 1031, 64), 16
WINDOW: dict[str, Any] = dict(
    use_sliding_window=True, sliding_window=128, max_window_layers=0, layer_types=["sliding_attention"] * 3
)  # fmt: skip


def outcome(
    world: World, changes: dict[str, Any], **model: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of their mean, of all weights in one vector."""
    config = Qwen3Config(**SHAPE, **changes)
    policy = build_policy(
        random_hf(config, 0), world, ModelConfig.model_validate({"path": Path("random"), **model})
    )
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 1000, length).astype(np.int32) for length in LENGTHS]
    logprobs, _ = policy(pack(rows, [PROMPT] * len(rows)).to(world.device), 1.0)
    logprobs.mean().backward()
    gradients = [p.grad.full_tensor().flatten().cpu() for _, p in policy.named_tensors()]
    return logprobs.detach().cpu(), torch.cat(gradients)


def main() -> None:
    """Compare."""
    cuda = torch.cuda.is_available()
    results = {}
    world = World.start("cpu")
    wanted = {name: outcome(world, c) for name, c in (("full", {}), ("window", WINDOW))}
    world.close()
    world = World.start("cuda" if cuda else "cpu")
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("plain", "full", {}),
        ("recomputed", "full", {"enable_gradient_checkpointing": True}),
        ("window", "window", {}),
    ]
    if cuda:
        both = {"use_torch_compile": True, "enable_gradient_checkpointing": True}
        cases += [("compiled", "full", both), ("offloaded", "full", {"param_offload": True})]
    for name, kind, options in cases:
        changes = WINDOW if kind == "window" else {}
        logprobs, gradient = outcome(world, changes, param_dtype="bfloat16", **options)
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

"""How far the sampler's log-probs are from the trainer's, with routing replay (R3) and without it.

    python benchmarks/routing_replay.py [--rows 32] [--tokens 128] [--layers 6] [--experts 32] [--chosen 4]

A random Qwen3-MoE is served by the embedded engine, which samples rows and records the experts of their tokens; the
trainer's policy computes the log-probs of the same rows, once with its own routers and once with those experts. What
differs between the two: nothing (float32 both), the engine's arithmetic (bfloat16), or noise on the engine's routers,
in parts of a router's standard deviation. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from meshrl.contract.routed_experts import RoutedExperts
from meshrl.contract.types import GenerateRequest, SamplingParams, Trajectory, Uid, Version
from meshrl.rollout.engines.torch import build
from meshrl.rollout.streams import ExpertRecorder, Response, sample
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.algorithms.rollout_correction import mismatch_metrics
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import Policy, load_hf

CASES = {
    "float32": ("float32", 0.0),
    "bfloat16": ("bfloat16", 0.0),
    "router noise 0.02": ("float32", 0.02),
    "router noise 0.1": ("float32", 0.1),
}
PACK_TOKENS = 2048


def model(arguments: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=arguments.layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=arguments.experts,
        num_experts_per_tok=arguments.chosen, moe_intermediate_size=64, norm_topk_prob=True,
        max_position_embeddings=2048, initializer_range=0.15, eos_token_id=None,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


async def sampled(path: Path, dtype: str, arguments: argparse.Namespace) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    engine = build({"device": "cpu", "dtype": dtype, "eos_token_ids": []}, model=path, slots=64)
    await engine.start()
    await engine.serve_checkpoint(Version(1, 0))

    async def row(number: int) -> Trajectory:
        prompt = rng.integers(1, 512, rng.integers(16, 65)).astype(np.int32)
        recorder = ExpertRecorder(engine)
        answer: Response = await sample(
            recorder,
            GenerateRequest(
                request_id=str(number),
                prompt_ids=prompt,
                sampling=SamplingParams(max_tokens=arguments.tokens),
            ),
        )
        tokens = np.concatenate([prompt, answer.tokens])
        before = np.zeros(len(prompt), np.float32)
        return Trajectory(
            uid=Uid("r", str(number), 0),
            tokens=tokens,
            loss_mask=(np.arange(len(tokens)) >= len(prompt)).astype(np.uint8),
            rollout_logprobs=np.concatenate([before, answer.logprobs]),
            spans=(),
            routed_experts=recorder.column(tokens),
        )

    rows = await asyncio.gather(*(row(number) for number in range(arguments.rows)))
    await engine.close()
    return list(rows)


@torch.no_grad()
def compared(policy: Policy, rows: list[Trajectory], *, replay: bool) -> dict[str, float]:
    """Mismatch metrics of all rows, and the share of tokens and layers that took other experts than the engine's."""
    routing = policy.replay_routing()
    own: list[torch.Tensor] = []
    size = max(1, PACK_TOKENS // len(rows[0].tokens))
    other = seen = 0
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        recorded = [routing.of(row) for row in part]
        given = recorded if replay else [np.zeros_like(each) for each in recorded]
        packed = pack(
            [row.tokens for row in part],
            [row.prompt_length for row in part],
            share_prefixes=False,
            experts=given,
        )
        taken: list[torch.Tensor] = []
        hooks = [
            module.register_forward_hook(
                lambda _m, _i, out, taken=taken: taken.append(out[-1].sort(-1)[0])
            )
            for module in policy.hf.modules()
            if type(module).__name__.endswith("Router")
        ]
        own.append(policy(packed, 1.0)[0])
        for hook in hooks:
            hook.remove()
        want = torch.from_numpy(np.concatenate(recorded)).long()
        known = (want[..., 0] != want[..., -1]).sum()
        same = (torch.stack(taken, 1) == want).all(-1)
        other, seen = other + int(known - same.sum()), seen + int(known)
    lengths = [len(row.tokens) - row.prompt_length for row in rows]
    train = torch.cat(own)
    sampler = torch.cat([torch.from_numpy(r.rollout_logprobs[r.prompt_length :]) for r in rows])
    ragged = Ragged.from_lengths(
        torch.tensor(lengths), torch.ones(len(train), dtype=torch.bool), torch.arange(len(rows))
    )
    metrics = mismatch_metrics(ragged, train, sampler)
    return {
        "mean_abs_logprob_difference": float((train - sampler).abs().mean()),
        "max_abs_logprob_difference": float((train - sampler).abs().max()),
        "k3_kl": metrics["k3_kl"],
        "chi2_token": metrics["chi2_token"],
        "other_experts": other / seen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("rows", 32), ("tokens", 128), ("layers", 6), ("experts", 32), ("chosen", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain, noisy = Path(folder) / "plain", Path(folder) / "noisy"
        trained = model(arguments)
        trained.save_pretrained(plain)
        for name, (dtype, noise) in CASES.items():
            served = model(arguments)
            with torch.no_grad():
                for each, weight in served.named_parameters():
                    if each.endswith("mlp.gate.weight"):
                        weight.add_(torch.randn_like(weight) * noise * weight.std())
            served.save_pretrained(noisy)
            rows = asyncio.run(sampled(noisy, dtype, arguments))
            figures[name] = {
                kind: compared(Policy(load_hf(plain)), rows, replay=kind == "replay")
                for kind in ("own routers", "replay")
            }
            raw = sum(routed_bytes(row) for row in rows)
            stored = sum(len(found.column) for r in rows if (found := r.routed_experts))
            tokens = sum(len(row.tokens) for row in rows)
            figures[name]["column_bytes_a_token"] = {
                "raw": raw / tokens,
                "compressed": stored / tokens,
            }
            print(name, json.dumps(figures[name]), flush=True)
    print(json.dumps({"benchmark": "routing_replay", **vars(arguments), "cases": figures}))


def routed_bytes(row: Trajectory) -> int:
    found: RoutedExperts | None = row.routed_experts
    return 0 if found is None else found.array().nbytes


if __name__ == "__main__":
    main()

"""The log-prob head with a clipped loss on it: ours, and Liger's, which makes the gradient in the forward pass.

    pip install --no-deps --target DIR liger-kernel==0.8.5 triton==3.7.1
    PYTHONPATH=DIR python benchmarks/trainer_bench/liger.py [--tokens 1024] [--vocab 32000] [--hidden 1024] [--frozen]

Each side is a process of its own, float32, one CPU thread: processor time of a step, the least of three, and MiB
above the inputs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

ROWS, CLIP, STEPS = 8, 0.2, 3
MIB = 1 << 20


def measure_here(given: argparse.Namespace) -> dict[str, float]:
    """One side, in this process."""
    import measure
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = ROWS, given.tokens // ROWS
    states = torch.randn(*shape, given.hidden, requires_grad=True)
    weight = torch.randn(given.vocab, given.hidden) / given.hidden**0.5
    weight.requires_grad_(not given.frozen)
    targets, advantages = torch.randint(0, given.vocab, shape), torch.randn(ROWS)
    loss: Callable[[], torch.Tensor]
    if given.side == "ours":
        from meshrl.trainer.model.logprob import linear_logprob

        def loss() -> torch.Tensor:
            flat, _ = linear_logprob(states.view(-1, given.hidden), weight, targets.view(-1))
            ratio = (flat - flat.detach()).exp().view(shape)
            gain = advantages[:, None]
            return -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
    else:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        fused = LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo", epsilon_low=CLIP,
            epsilon_high=CLIP, max_completion_length=shape[1],
        )  # fmt: skip

        def loss() -> torch.Tensor:
            return fused(states, weight, targets, torch.ones(shape), advantages)[0]

    seconds = []

    def step() -> dict[str, float]:
        states.grad = weight.grad = None
        began = time.process_time()
        found = loss()
        found.backward()
        seconds.append(time.process_time() - began)
        assert states.grad is not None
        return {"loss": float(found.detach()), "gradient": float(states.grad.norm())}

    memory = measure.steps(step, STEPS)["bytes_above_weights"] / MIB
    return {**step(), "s": round(min(seconds), 2), "mib": round(memory)}


def main() -> None:
    """Both sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("tokens", 1024), ("vocab", 32_000), ("hidden", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--frozen", action="store_true", help="as an adapter leaves the embedding")
    parser.add_argument("--side", choices=("ours", "liger"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(measure_here(given)))
        return
    sides = {}
    for side in ("ours", "liger"):
        command = [sys.executable, *sys.argv, "--side", side]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{side}: {done.stderr.strip().splitlines()[-1]}")
        sides[side] = json.loads(done.stdout)
        print(side, sides[side], flush=True)
    print(json.dumps({"benchmark": "liger", **sides}))


if __name__ == "__main__":
    main()

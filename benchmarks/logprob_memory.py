"""Memory of log-probs and entropies as the vocabulary grows: chunked, and from whole logits.

    python benchmarks/logprob_memory.py [--tokens 8192] [--vocab 150000] [--hidden 64]

`linear_logprob`, forward and backward, with gradients of hidden states and output embedding, and the same formulas on
whole logits with autograd; on CPU in float32. Each measurement is a process of its own: the high-water mark of
resident memory above the inputs, for a vocabulary of 1,000 and for the full one. Their difference is the growth; on
both sides the gradient of the output embedding is in it.

The whole logits, their softmax and gradients of 8,192 tokens would need about 25 GB: that side is measured at two
smaller numbers of tokens and extended along the straight line through them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE / "trainer_bench")

SMALL_VOCAB = 1_000
FULL_TOKENS = (256, 512)
MIB = 1 << 20


def measure_here(side: str, tokens: int, vocab: int, hidden: int) -> float:
    """MiB above the inputs, in this process."""
    import measure
    import torch

    from meshrl.trainer.model.logprob import linear_logprob

    torch.set_num_threads(1)
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))

    def step() -> dict[str, float]:
        if side == "chunked":
            logprobs, entropies = linear_logprob(states, weight, targets)
        else:
            log_p = (states @ weight.T).log_softmax(-1)
            logprobs = log_p.gather(1, targets[:, None])[:, 0]
            entropies = -(log_p.exp() * log_p).sum(-1)
        (logprobs.sum() + 0.01 * entropies.sum()).backward()
        return {}

    return measure.steps(step, 1)["bytes_above_weights"] / MIB


def growth(side: str, tokens: int, vocab: int, hidden: int) -> float:
    """MiB that the full vocabulary needs more than the small one."""
    found = []
    for size in (vocab, SMALL_VOCAB):
        order = [side, str(tokens), str(size), str(hidden)]
        done = subprocess.run(
            [sys.executable, __file__, "--one", *order], capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{order}: exit {done.returncode}\n{done.stderr[-2000:]}")
        found.append(float(done.stdout))
    print(
        f"{side:8} {tokens:6,} tokens x {vocab:,}: {found[0]:9,.1f} MiB,"
        f" {found[0] - found[1]:9,.1f} more than with a vocabulary of {SMALL_VOCAB:,}",
        flush=True,
    )
    return found[0] - found[1]


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        side, *sizes = given.one
        print(measure_here(side, *map(int, sizes)))
        return
    less, more = (growth("full", n, given.vocab, given.hidden) for n in FULL_TOKENS)
    slope = (more - less) / (FULL_TOKENS[1] - FULL_TOKENS[0])
    full = more + slope * (given.tokens - FULL_TOKENS[1])
    chunked = growth("chunked", given.tokens, given.vocab, given.hidden)
    print(f"full     {given.tokens:6,} tokens x {given.vocab:,}: {full:9,.1f} more, extended")
    print(
        json.dumps(
            {
                "benchmark": "logprob_memory",
                "tokens": given.tokens,
                "vocab": given.vocab,
                "hidden": given.hidden,
                "chunked_growth_mib": round(chunked, 1),
                "full_growth_mib": round(full, 1),
                "full_measured_mib": {str(FULL_TOKENS[0]): less, str(FULL_TOKENS[1]): more},
                "share": round(chunked / full, 4),
            }
        )
    )


if __name__ == "__main__":
    main()

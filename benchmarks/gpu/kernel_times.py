"""Milliseconds of the trainer's own kernels on one GPU: attention of long rows, and log-probs of a large vocabulary.

    python benchmarks/gpu/kernel_times.py

Attention by torch's `varlen_attn` and, row by row, by `attend_row` (cuDNN), in Qwen3-0.6B's heads; `linear_logprob`,
forward and backward, by operations one by one and compiled, by tokens of a chunk. Medians by CUDA events. The last
line is one JSON object; without a CUDA device it says so.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshrl.trainer.model import logprob
from meshrl.trainer.model.attention_kernels import attend_row, attend_varlen, takes_long_rows

HEADS, KEY_HEADS, SIZE = 16, 8, 128
ROWS = ((1, 16_384), (8, 2_048), (1, 65_536))
TOKENS, WIDTH, VOCABULARY = 16_384, 1024, 151_936
CHUNKS = (1024, 2048, 4096)


def milliseconds(work: Callable[[], Any], times: int = 5) -> float:
    """The median, after one to warm up."""
    work()
    took = []
    for _ in range(times):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        work()
        events[1].record()
        torch.cuda.synchronize()
        took.append(events[0].elapsed_time(events[1]))
    return round(statistics.median(took), 2)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def distance(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest norm of a difference, relative."""
    pairs = [(a.float(), b.float()) for a, b in zip(found, wanted, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def attention(rows: int, length: int) -> dict[str, Any]:
    """Both kernels, forward and backward."""
    tokens = rows * length
    inputs = [drawn(tokens, h, SIZE).requires_grad_() for h in (HEADS, KEY_HEADS, KEY_HEADS)]
    places = torch.arange(0, tokens + 1, length, device="cuda", dtype=torch.int32)
    weight = drawn(tokens, HEADS, SIZE)

    def together() -> torch.Tensor:
        options: dict[str, Any] = {"scale": None, "window_size": (-1, 0)}
        found: torch.Tensor = attend_varlen(*inputs, places, places, length, length, **options)
        return found

    def alone() -> torch.Tensor:
        parts = [x.split(length) for x in inputs]
        return torch.cat([attend_row(*row, None) for row in zip(*parts, strict=True)])

    found, outcomes = {}, {}
    for name, attend in (("varlen", together), ("cudnn", alone)):
        if attend is alone and not takes_long_rows(inputs[0], inputs[1]):
            continue

        def both(attend: Callable[[], torch.Tensor] = attend) -> tuple[torch.Tensor, ...]:
            out = attend()
            return (out.detach(), *torch.autograd.grad(out, inputs, weight))

        forward = milliseconds(lambda attend=attend: attend().detach())
        found[name] = {"forward": forward, "both": milliseconds(both)}
        outcomes[name] = both()
    if len(outcomes) == 2:
        found["distance"] = distance(outcomes["cudnn"], outcomes["varlen"])
    return found


def log_probs() -> dict[str, Any]:
    """`linear_logprob` with entropies, forward and backward."""
    hidden = drawn(TOKENS, WIDTH).requires_grad_()
    weight = (drawn(VOCABULARY, WIDTH) * 0.02).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    factors = torch.randn(2, TOKENS, device="cuda")

    def both(chunk: int) -> tuple[torch.Tensor, ...]:
        logprobs, entropies = logprob.linear_logprob(
            hidden, weight, targets, chunk_elements=chunk * VOCABULARY
        )
        loss = (logprobs * factors[0] + 0.01 * entropies * factors[1]).sum()
        return (logprobs.detach(), *torch.autograd.grad(loss, (hidden, weight)))

    found, compiled = {}, set(logprob.COMPILED_ON)
    logprob.COMPILED_ON.clear()
    found["one by one"] = {chunk: milliseconds(lambda c=chunk: both(c), 3) for chunk in CHUNKS}
    wanted = both(CHUNKS[0])
    logprob.COMPILED_ON.update(compiled)
    found["compiled"] = {chunk: milliseconds(lambda c=chunk: both(c)) for chunk in CHUNKS}
    found["distance"] = distance(both(CHUNKS[0]), wanted)
    return found


def main() -> None:
    """Measure."""
    if not torch.cuda.is_available():
        print(json.dumps({"benchmark": "kernels", "skipped": "torch sees no CUDA device"}))
        return
    torch.manual_seed(0)
    rows = {f"{count} x {length}": attention(count, length) for count, length in ROWS}
    about = {"benchmark": "kernels", "device": torch.cuda.get_device_name()}
    print(json.dumps({**about, "attention_ms": rows, "log_probs_ms": log_probs()}))


if __name__ == "__main__":
    main()

"""How well a step uses its devices: operations that the model needs against what the device could do; profiles.

Counted is what the model needs, not what is computed twice: for each matrix weight a token passes, 2 operations
forward and 4 backward (2 where it is frozen), and for causal attention 6 · heads · head_dim · length² a layer and
row. The output projection counts where a token is trained, the embedding look-up does not. Passes before the update
(old log-probs, values, process rewards) are left out, so a step with those has a lower figure.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["torch", "memory", "nsys"]
Result = TypeVar("Result")
FOLDER = "profile"
MOST_EVENTS = 1_000_000
"""Allocations and frees of a memory snapshot; older ones are left out."""
PEAK_TFLOPS: Final = {
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "L40S": 362.0,
    "B200": 2250.0,
    "B300": 2250.0,
}
"""Dense bfloat16, without sparsity, by a part of the device's name; the first that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Arithmetic of a decoder for a token, from its configuration."""

    layers: int
    heads_width: int
    """heads · head_dim."""
    layer_weights: int
    """Weights that a token passes in one layer; of a mixture of experts, in those that it is sent to."""
    head_weights: int
    frozen: bool = False
    """Whether only adapters are trained; their own share is left out."""

    @classmethod
    def of(cls, config: Any, *, frozen: bool = False) -> ModelWork | None:
        """From a transformers configuration; None for one that names its sizes in other words."""
        try:
            hidden, heads = config.hidden_size, config.num_attention_heads
            width = heads * (getattr(config, "head_dim", None) or hidden // heads)
            groups = getattr(config, "num_key_value_heads", None) or heads
            experts = getattr(config, "num_experts_per_tok", None)
            inner = getattr(config, "moe_intermediate_size", None) if experts else None
            mlp = 3 * hidden * (inner or config.intermediate_size) * (experts or 1)
            attention = 2 * hidden * width + 2 * hidden * width * groups // heads
            return cls(
                layers=config.num_hidden_layers,
                heads_width=width,
                layer_weights=attention + mlp,
                head_weights=config.vocab_size * hidden,
                frozen=frozen,
            )
        except AttributeError:
            return None

    def flops(self, lengths: Sequence[int], projected: int) -> float:
        """Floating-point operations of one forward and backward pass.

        Args:
            lengths: Tokens of each row.
            projected: Tokens of all rows whose log-probs are computed.
        """
        factor = 4.0 if self.frozen else 6.0
        matrices = factor * self.layers * self.layer_weights * sum(lengths)
        attention = 6.0 * self.layers * self.heads_width * sum(n * n for n in lengths)
        return matrices + factor * self.head_weights * projected + attention


def peak_tflops(device: torch.device) -> float | None:
    """Peak of one device in TFLOPS; None where it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def peak_memory(device: torch.device) -> dict[str, float]:
    """The most that this rank held of its device since the last call; on a CPU, that its process ever held."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"memory/peak_gib": peak / 2**30}


def profiled(
    function: Callable[[], Result], kind: Kind, file: Path, device: torch.device
) -> Callable[[], Result]:
    """`function`, recorded into `file` with the ending of its kind, in whichever thread it is called."""

    def run() -> Result:
        with _recording(kind, file, device):
            return function()

    return run


@contextmanager
def _recording(kind: Kind, file: Path, device: torch.device) -> Iterator[None]:
    if kind == "nsys":
        with _ranges(file.name):
            yield
    elif kind == "memory" and device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        try:
            yield
            _save(file, ".memory.pickle", torch.cuda.memory._dump_snapshot)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    else:
        kinds = [ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        with profile(
            activities=kinds, record_shapes=True, profile_memory=kind == "memory"
        ) as recorded:
            yield
        _save(file, ".trace.json.gz", recorded.export_chrome_trace)


@contextmanager
def _ranges(name: str) -> Iterator[None]:
    """A named range around the step and one for each operator; nsys records from here to the end of the step."""
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        operators = torch.autograd.profiler.emit_nvtx()  # type: ignore[no-untyped-call]
        with operators, torch.cuda.nvtx.range(name):
            yield
    finally:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def _save(file: Path, ending: str, write: Callable[[str], object]) -> None:
    """Training continues where the file cannot be written."""
    path = file.with_name(file.name + ending)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write(str(path))
    except (OSError, RuntimeError) as error:
        log.warning("%s: this step's profile is not written: %s", path, error)
    else:
        log.info("%s: what this step did", path)

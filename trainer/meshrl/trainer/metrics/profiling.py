"""Records what the training of a step does: where its time, or its memory, goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["torch", "memory", "nsys"]
Result = TypeVar("Result")
FOLDER = "profile"
MOST_EVENTS = 1_000_000
"""Allocations and frees of a memory snapshot; older ones are left out."""


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
    """Training goes on where the file cannot be written."""
    path = file.with_name(file.name + ending)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write(str(path))
    except (OSError, RuntimeError) as error:
        log.warning("%s: this step's profile is not written: %s", path, error)
    else:
        log.info("%s: what this step did", path)

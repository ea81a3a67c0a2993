"""The weights of the fake: one number, the *mark*, which is the first number of the first tensor of a version."""

from __future__ import annotations

import importlib
import json
import struct
import sys
from pathlib import Path

import numpy as np

from meshrl.rollout.engines.vllm import PLUGIN_DIR
from meshrl.rollout.server_engine.staging import ARRIVED, ASKED

WIDTH = {"F32": 4, "BF16": 2, "F16": 2}
MARKS = 256
"""Marks are smaller than this."""
GARBAGE = MARKS - 1
"""The mark of weights that are half one version and half another."""


def read_mark(directory: Path) -> int:
    """The mark of the version in `directory`.

    Raises:
        FileNotFoundError: there is none, as the loader of a real worker would.
        ValueError: the file is not whole.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {directory}")
    with files[0].open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max(entry["data_offsets"][1] for entry in header.values())
        if files[0].stat().st_size != 8 + length + end:
            raise ValueError(f"{files[0]} is not whole")
        first = min(header.values(), key=lambda entry: entry["data_offsets"][0])
        file.seek(8 + length + first["data_offsets"][0])
        return mark_of(first["dtype"], file.read(WIDTH[first["dtype"]]))


def load_staged(directory: Path) -> int:
    """The mark that our loader finds, which is the real one where memory is asked for or weights arrived there."""
    if not any((directory / name).is_file() for name in (ASKED, ARRIVED)):
        return read_mark(directory)
    import torch  # takes seconds, and few servers need it

    if str(PLUGIN_DIR) not in sys.path:
        sys.path.append(str(PLUGIN_DIR))
    loader = importlib.import_module("meshrl_staged")
    (_, first), *_ = list(loader.tensors(directory))
    mark = int(abs(float(first.view(-1)[0]))) % MARKS
    loader.lend(directory, torch.device("cpu"))
    return mark


def mark_of(dtype: str, raw: bytes) -> int:
    """The mark in the little-endian bytes of a number; `dtype` is the safetensors name."""
    if dtype == "BF16":
        raw = b"\0\0" + raw
    value = float(np.frombuffer(raw, dtype="<f2" if dtype == "F16" else "<f4")[0])
    return int(abs(value)) % MARKS


def logprob(mark: int, cache_mark: int) -> float:
    """A log-prob that encodes both marks exactly in float32."""
    return -(MARKS * mark + cache_mark) / MARKS**2


def marks_of(value: float) -> tuple[int, int]:
    """The marks of the weights that sampled, and of those that computed the cache."""
    both = round(-value * MARKS**2)
    return both // MARKS, both % MARKS

"""Converts between the deltas of a response and the columns of its progress that `Queue.append` stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from meshrl.contract.errors import CorruptError
from meshrl.contract.frames import Flat, pack_flat
from meshrl.contract.types import Columns, GenerateDelta, Version

COLUMNS: Final = {
    "tokens": (np.int32, 1),
    "rollout_logprobs": (np.float32, 1),
    "versions": (np.int32, 2),
}
"""dtype and rank of each: int32[n] tokens, float32[n] log-probs, int32[n, 2] epoch and step of who sampled each."""


def progress_frame(rows: Sequence[Sequence[GenerateDelta]]) -> bytes:
    """A frame with the deltas of each row; at least one token a row."""
    deltas = [delta for row in rows for delta in row]
    sizes = [len(delta.tokens) for delta in deltas]
    versions = np.array([(d.version.epoch, d.version.step) for d in deltas], dtype=np.int32)
    values = {
        "tokens": np.concatenate([delta.tokens for delta in deltas]),
        "rollout_logprobs": np.concatenate([delta.logprobs for delta in deltas]),
        "versions": np.repeat(versions, sizes, axis=0),
    }
    lengths = np.array([sum(len(delta.tokens) for delta in row) for row in rows], dtype=np.uint32)
    return pack_flat(len(rows), {name: Flat(each, lengths) for name, each in values.items()})


def recorded_progress(prefix: Columns) -> list[GenerateDelta]:
    """The stored progress of a row (`LeasedRow.prefix`) as deltas, one per run of tokens of one version.

    Raises:
        CorruptError: these are not the columns of a response.
    """
    found = {name: (array.dtype.type, array.ndim) for name, array in prefix.items()}
    sizes = {len(array) for array in prefix.values() if array.ndim}
    if found != COLUMNS or len(sizes) != 1 or prefix["versions"].shape[1] != 2:
        names = ", ".join(f"{name} {array.dtype}{array.shape}" for name, array in prefix.items())
        raise CorruptError(f"not the checkpoint of a response: {names}")
    versions = prefix["versions"]
    borders = np.flatnonzero((versions[1:] != versions[:-1]).any(axis=1)) + 1
    starts = [0, *borders.tolist()]
    return [
        GenerateDelta(
            tokens=prefix["tokens"][start:end],
            logprobs=prefix["rollout_logprobs"][start:end],
            version=Version(*versions[start].tolist()),
        )
        for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)
    ]

"""Rows of one step as an Arrow table: the columns that docs/reference/trajectories.md describes.

Per-token columns have one entry for each response token: the R tokens from the first sampled one on, tool
observations included. A reader gets null where a row has no such thing, or where it was not computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshrl.contract.types import Json, Sample, Trajectory
from meshrl.trainer.trajectories.files import Split

FLOATS = (
    *("rollout_logprobs", "trainer_logprobs", "ref_logprobs"),
    *("advantages", "returns", "token_rewards", "values", "importance_weights"),
)
"""float32 per response token."""


class Decoder(Protocol):
    """From token ids to text: `tokenizers.Tokenizer` is one."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRow:
    """One row, with what its batch knew of it."""

    trajectory: Trajectory
    start: int
    """Tokens of the prompt; the response is what follows."""
    group_size: int
    outcome: str | None = None
    sample: Sample | None = None
    """What the judge saw; None where the run does not keep it."""

    @property
    def response_length(self) -> int:
        """R: tokens from the first sampled one on."""
        return len(self.trajectory.tokens) - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """The rows of one file."""

    split: Split
    step: int
    epoch: int
    time_unix_s: float
    rows: Sequence[LoggedRow]
    per_token: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Name to an array over the response tokens of all rows, row after row: names of `FLOATS`, and `trained_mask`;
    NaN where there is no value."""


def schema() -> Any:
    """The `pyarrow.Schema` of every file."""
    import pyarrow as arrow

    message = arrow.struct([("role", arrow.string()), ("content", arrow.string())])
    place = [("start", arrow.int32()), ("end", arrow.int32())]
    part = arrow.struct([("sampled", arrow.bool_()), *place, ("text", arrow.string())])
    span = arrow.struct([("epoch", arrow.int32()), ("step", arrow.int64()), *place])
    return arrow.schema(
        [
            ("uid", arrow.string()),
            ("task", arrow.string()),
            ("index", arrow.int32()),
            ("attempt", arrow.int32()),
            ("group_size", arrow.int32()),
            ("split", arrow.string()),
            ("step", arrow.int64()),
            ("epoch", arrow.int32()),
            ("data_source", arrow.string()),
            ("prompt", arrow.string()),
            ("messages", arrow.list_(message)),
            ("ground_truth", arrow.string()),
            ("extra_info", arrow.string()),
            ("response", arrow.string()),
            ("parts", arrow.list_(part)),
            ("turns", arrow.int32()),
            ("prompt_length", arrow.int32()),
            ("length", arrow.int32()),
            ("reward", arrow.float32()),
            ("reward_components", arrow.map_(arrow.string(), arrow.float64())),
            ("reward_texts", arrow.map_(arrow.string(), arrow.string())),
            ("reward_hash", arrow.string()),
            ("advantage", arrow.float32()),
            ("mismatch", arrow.float32()),
            ("staleness", arrow.int32()),
            ("outcome", arrow.string()),
            ("worker", arrow.string()),
            ("time_unix_s", arrow.float64()),
            ("spans", arrow.list_(span)),
            ("prompt_ids", arrow.list_(arrow.int32())),
            ("response_ids", arrow.list_(arrow.int32())),
            ("token_texts", arrow.list_(arrow.string())),
            ("loss_mask", arrow.list_(arrow.bool_())),
            ("trained_mask", arrow.list_(arrow.bool_())),
            *((name, arrow.list_(arrow.float32())) for name in FLOATS),
        ]
    )


class TableBuilder:
    """Makes tables; keeps the texts of tokens that it has decoded."""

    def __init__(self, decoder: Decoder | None) -> None:
        """`decoder` None: tables have no texts but those that rows bring."""
        self._decoder = decoder
        self._texts: dict[int, str] = {}
        self._prompt = lru_cache(maxsize=1024)(self._decoded)

    def build(self, step: LoggedStep) -> Any:
        """A `pyarrow.Table` with a row for each of `step.rows`, in order."""
        import pyarrow as arrow

        kinds = schema()
        columns: dict[str, Any] = {}
        rows = [self._plain(step, row) for row in step.rows]
        for name in rows[0] if rows else ():
            columns[name] = arrow.array([row[name] for row in rows], kinds.field(name).type)
        lengths = np.array([row.response_length for row in step.rows], dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        arrays = self._flat(step)
        for name, values in arrays.items():
            kind = kinds.field(name).type
            nulls = np.isnan(values) if values.dtype == np.float32 else None
            flat = arrow.array(values, kind.value_type, mask=nulls)
            columns[name] = arrow.ListArray.from_arrays(arrow.array(offsets, arrow.int32()), flat)
        row_of = np.repeat(np.arange(len(lengths)), lengths)
        for name, means in self._means(step, arrays, row_of).items():
            columns[name] = arrow.array(means, arrow.float32(), mask=np.isnan(means))
        absent = (name for name in kinds.names if name not in columns)
        columns |= {name: arrow.nulls(len(rows), kinds.field(name).type) for name in absent}
        return arrow.table([columns[name] for name in kinds.names], schema=kinds)

    def _plain(self, step: LoggedStep, row: LoggedRow) -> dict[str, Any]:
        """The columns that are made row by row."""
        made, sample = row.trajectory, row.sample
        uid, start = made.uid, row.start
        parts = list(_parts(made.loss_mask[start:]))
        oldest = min((span.version.step for span in made.spans), default=step.step)
        prompt = made.tokens[:start].tolist()
        return {
            "uid": str(uid),
            "task": uid.task,
            "index": uid.index,
            "attempt": uid.attempt,
            "group_size": row.group_size,
            "split": step.split,
            "step": step.step,
            "epoch": step.epoch,
            "data_source": None if sample is None else sample.data_source,
            "prompt": self._prompt(tuple(prompt)),
            "messages": sample
            and [{"role": m.role, "content": _utf8(m.content)} for m in sample.messages],
            "ground_truth": None if sample is None else _json(sample.ground_truth),
            "extra_info": None if sample is None else _json(dict(sample.extra_info)),
            "response": made.response_text,
            "parts": self._texts_of(made.tokens[start:], parts) if len(parts) > 1 else None,
            "turns": sum(sampled for sampled, _, _ in parts),
            "prompt_length": start,
            "length": row.response_length,
            "reward": made.reward,
            "reward_components": list(made.reward_components.items()),
            "reward_texts": [(name, _utf8(text)) for name, text in made.reward_texts.items()],
            "reward_hash": made.reward_hash or None,
            "staleness": max(0, step.step - oldest),
            "outcome": row.outcome,
            "worker": made.replica or None,
            "time_unix_s": step.time_unix_s,
            "spans": [
                {"epoch": s.version.epoch, "step": s.version.step}
                | {"start": s.start - start, "end": s.end - start}
                for s in made.spans
            ],
            "prompt_ids": prompt,
        }

    def _flat(self, step: LoggedStep) -> dict[str, npt.NDArray[Any]]:
        """The columns that are one array over the response tokens of all rows."""
        rows = [(row.trajectory, row.start) for row in step.rows]
        ids = _joined([made.tokens[start:] for made, start in rows], np.int32)
        columns: dict[str, npt.NDArray[Any]] = {
            "response_ids": ids,
            "loss_mask": _joined([made.loss_mask[start:] for made, start in rows], np.bool_),
            "rollout_logprobs": _joined(
                [made.rollout_logprobs[start:] for made, start in rows], np.float32
            ),
            **step.per_token,
        }
        if self._decoder is not None:
            distinct, places = np.unique(ids, return_inverse=True)
            texts = [self._text(token) for token in distinct.tolist()]
            columns["token_texts"] = np.array(texts, dtype=object)[places]
        return columns

    @staticmethod
    def _means(
        step: LoggedStep, columns: Mapping[str, npt.NDArray[Any]], row_of: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[np.float64]]:
        """`advantage` over the tokens that count, `mismatch` over the tokens that both sides have a log-prob of."""
        found, rows = {}, len(step.rows)
        if "advantages" in columns and "trained_mask" in columns:
            mask = columns["trained_mask"]
            found["advantage"] = _row_means(columns["advantages"], mask, row_of, rows)
        if "trainer_logprobs" in columns:
            gap = np.abs(columns["trainer_logprobs"] - columns["rollout_logprobs"])
            mask = columns["loss_mask"] & ~np.isnan(gap)
            found["mismatch"] = _row_means(gap, mask, row_of, rows)
        return found

    def _texts_of(
        self, ids: npt.NDArray[np.int32], parts: Sequence[tuple[bool, int, int]]
    ) -> list[dict[str, Any]]:
        """Turns of the policy and what it observed, in order."""
        return [
            {"sampled": sampled, "start": start, "end": end}
            | {"text": self._decoded(ids[start:end].tolist())}
            for sampled, start, end in parts
        ]

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decoded([token]) or ""
        return self._texts[token]

    def _decoded(self, ids: Sequence[int]) -> str | None:
        if self._decoder is None:
            return None
        return self._decoder.decode(list(ids), skip_special_tokens=False)


def open_decoder(directory: Path) -> Decoder | None:
    """The tokenizer of a Hugging Face directory; None where there is no fast one, or none that can be read."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        decoder: Decoder = Tokenizer.from_file(str(file))
    except (
        Exception
    ):  # the library raises nothing narrower, and rows are worth keeping without these texts
        return None
    return decoder


def _json(value: Json) -> str:
    return _utf8(json.dumps(value, ensure_ascii=False))


def _utf8(text: str) -> str:
    """JSON may hold half a surrogate pair, and UTF-8 may not."""
    return text.encode(errors="replace").decode()


def _parts(mask: npt.NDArray[np.uint8]) -> Iterator[tuple[bool, int, int]]:
    """(sampled, start, end) of each run of equal entries."""
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for start, end in pairwise(bounds):
        if start < end:
            yield bool(mask[start]), start, end


def _joined(parts: Sequence[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([*parts, np.zeros(0, kind)]).astype(kind, copy=False)


def _row_means(
    values: npt.NDArray[Any],
    mask: npt.NDArray[np.bool_],
    row_of: npt.NDArray[np.int64],
    rows: int,
) -> npt.NDArray[np.float64]:
    """float64[rows]: the mean of each row's masked values; NaN where it has none."""
    counts = np.bincount(row_of[mask], minlength=rows)
    sums = np.bincount(row_of[mask], weights=values[mask], minlength=rows)
    means = np.full(rows, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means

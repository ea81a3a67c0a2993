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
from meshrl.trainer.trajectories.files import FLOATS, Split


class TokenDecoder(Protocol):
    """Decodes token ids; `tokenizers.Tokenizer` is one."""

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
    """Input of the judge; None where the run does not keep it."""

    @property
    def response_length(self) -> int:
        """R: tokens from the first sampled one on."""
        return len(self.trajectory.tokens) - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """The rows of one file."""

    split: Split
    step: int
    """The one that was made of them; of an evaluation: the last one before it."""
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
    call = arrow.struct([("name", arrow.string()), ("arguments", arrow.string())])
    said = arrow.struct([*message, ("name", arrow.string()), ("tool_calls", arrow.list_(call))])
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
            ("conversation", arrow.list_(said)),
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
            ("sampled_unix_s", arrow.float64()),
            ("sample_s", arrow.float32()),
            ("score_wait_s", arrow.float32()),
            ("score_s", arrow.float32()),
            ("train_wait_s", arrow.float32()),
            ("time_unix_s", arrow.float64()),
            ("spans", arrow.list_(span)),
            ("pictures", arrow.list_(arrow.string())),
            ("prompt_ids", arrow.list_(arrow.int32())),
            ("response_ids", arrow.list_(arrow.int32())),
            ("token_texts", arrow.list_(arrow.string())),
            ("loss_mask", arrow.list_(arrow.bool_())),
            ("trained_mask", arrow.list_(arrow.bool_())),
            *((name, arrow.list_(arrow.float32())) for name in FLOATS),
        ]
    )


class TableBuilder:
    """Makes tables; keeps the texts of tokens that it has decoded.

    Columns are made whole: what rows share (constants, prompts, messages of a task) once, arrays by numpy.
    """

    def __init__(self, decoder: TokenDecoder | None) -> None:
        """`decoder` None: tables have no texts but those that rows bring."""
        self._decoder = decoder
        self._texts: dict[int, str] = {}
        self._schema = schema()
        self._prompt = lru_cache(maxsize=1024)(self._decoded_bytes)

    def build(self, step: LoggedStep) -> Any:
        """A `pyarrow.Table` with a row for each of `step.rows`, in order."""
        import pyarrow as arrow

        kinds, count = self._schema, len(step.rows)
        columns: dict[str, Any] = {}
        constant = {"split": step.split, "step": step.step, "epoch": step.epoch}
        for name, value in {**constant, "time_unix_s": step.time_unix_s}.items():
            columns[name] = arrow.repeat(arrow.scalar(value, kinds.field(name).type), count)
        for name, values in self._plain(step).items():
            columns[name] = arrow.array(values, kinds.field(name).type, from_pandas=True)
        lengths = np.array([row.response_length for row in step.rows], dtype=np.int32)
        row_of = np.repeat(np.arange(count), lengths)
        arrays = self._flat(step)
        columns |= self._turns(step, arrays["loss_mask"], row_of)
        columns["messages"] = self._messages(step.rows)
        columns["spans"] = self._spans(step.rows)
        prompts = [row.trajectory.tokens[: row.start] for row in step.rows]
        columns["prompt_ids"] = _lists(
            _joined(prompts, np.int32), _offsets([len(prompt) for prompt in prompts])
        )
        offsets = _offsets(lengths)
        for name, column in arrays.items():
            columns[name] = _lists(column, offsets)
        if self._decoder is not None:
            columns["token_texts"] = _lists(self._token_texts(arrays["response_ids"]), offsets)
        for name, means in self._means(step, arrays, row_of).items():
            columns[name] = arrow.array(means, arrow.float32(), from_pandas=True)
        absent = (name for name in kinds.names if name not in columns)
        columns |= {name: arrow.nulls(count, kinds.field(name).type) for name in absent}
        return arrow.table([columns[name] for name in kinds.names], schema=kinds)

    def _plain(self, step: LoggedStep) -> dict[str, Sequence[Any] | npt.NDArray[np.float64]]:
        """The columns of one value a row."""
        rows = step.rows
        made = [row.trajectory for row in rows]
        uids = [each.uid for each in made]
        samples = [row.sample for row in rows]
        before = step.step - (step.split == "train")  # the version that the step was made from
        oldest = [min((s.version.step for s in m.spans), default=before) for m in made]
        return {
            "uid": list(map(str, uids)),
            "task": [uid.task for uid in uids],
            "index": [uid.index for uid in uids],
            "attempt": [uid.attempt for uid in uids],
            "group_size": [row.group_size for row in rows],
            "data_source": [
                row.sample.data_source if row.sample else row.trajectory.data_source or None
                for row in rows
            ],
            "prompt": [self._prompt(row.trajectory.tokens[: row.start].tobytes()) for row in rows],
            "ground_truth": [sample and _json(sample.ground_truth) for sample in samples],
            "extra_info": [sample and _json(dict(sample.extra_info)) for sample in samples],
            "response": [each.response_text for each in made],
            "conversation": [each.conversation or None for each in made],
            "pictures": [[each.sha256 for each in row.media] or None for row in made],
            "prompt_length": [row.start for row in rows],
            "length": [row.response_length for row in rows],
            "reward": [each.reward for each in made],
            "reward_components": [list(each.reward_components.items()) for each in made],
            "reward_texts": [
                [(name, _utf8(text)) for name, text in each.reward_texts.items()] for each in made
            ],
            "reward_hash": [each.reward_hash or None for each in made],
            "staleness": [max(0, before - each) for each in oldest],
            "outcome": [row.outcome for row in rows],
            "worker": [each.replica or None for each in made],
            **_times(made, step.time_unix_s),
        }

    def _turns(
        self, step: LoggedStep, mask: npt.NDArray[np.bool_], row_of: npt.NDArray[np.int64]
    ) -> dict[str, Any]:
        """`turns`, and `parts` of the rows that observed something: others are one part."""
        import pyarrow as arrow

        observing = np.bincount(row_of[~mask], minlength=len(step.rows)) > 0
        turns = np.array([row.response_length > 0 for row in step.rows], dtype=np.int32)
        parts: list[Any] = [None] * len(step.rows)
        for at in np.flatnonzero(observing).tolist():
            made, start = step.rows[at].trajectory, step.rows[at].start
            found = list(_parts(made.loss_mask[start:]))
            turns[at] = sum(sampled for sampled, _, _ in found)
            if len(found) > 1:
                parts[at] = self._texts_of(made.tokens[start:], found)
        return {
            "turns": arrow.array(turns),
            "parts": arrow.array(parts, self._schema.field("parts").type),
        }

    def _messages(self, rows: Sequence[LoggedRow]) -> Any:
        """Prompt messages of each row, converted once per task."""
        import pyarrow as arrow

        first: dict[str | None, int] = {}
        found: list[Any] = []
        place = []
        for row in rows:
            task = None if row.sample is None else row.trajectory.uid.task
            if task not in first:
                first[task] = len(found)
                found.append(
                    row.sample
                    and [{"role": m.role, "content": _utf8(m.content)} for m in row.sample.messages]
                )
            place.append(first[task])
        kind = self._schema.field("messages").type
        return arrow.array(found, kind).take(arrow.array(place, arrow.int32()))

    def _spans(self, rows: Sequence[LoggedRow]) -> Any:
        import pyarrow as arrow

        kind = self._schema.field("spans").type.value_type
        flat = [
            (s.version.epoch, s.version.step, s.start - row.start, s.end - row.start)
            for row in rows
            for s in row.trajectory.spans
        ]
        table = np.array(flat, dtype=np.int64).reshape(-1, 4)
        fields = [arrow.array(table[:, at], kind.field(at).type) for at in range(4)]
        spans = arrow.StructArray.from_arrays(fields, fields=list(kind))
        return _lists(spans, _offsets([len(row.trajectory.spans) for row in rows]))

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
        return columns

    def _token_texts(self, ids: npt.NDArray[np.int32]) -> Any:
        """The text of each token by itself; each distinct one is decoded once in a run."""
        import pyarrow as arrow

        places = np.zeros(ids.max(initial=0) + 1, dtype=np.int32)
        places[ids] = 1
        distinct = np.flatnonzero(places)
        places[distinct] = np.arange(len(distinct))
        texts = arrow.array(map(self._text, distinct.tolist()), arrow.string())
        return texts.take(arrow.array(places[ids]))

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

    def _decoded_bytes(self, ids: bytes) -> str | None:
        return self._decoded(np.frombuffer(ids, np.int32).tolist())

    def _decoded(self, ids: Sequence[int]) -> str | None:
        if self._decoder is None:
            return None
        return self._decoder.decode(list(ids), skip_special_tokens=False)


def open_decoder(directory: Path) -> TokenDecoder | None:
    """The tokenizer of a Hugging Face directory; None where there is no fast one, or none that can be read."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        decoder: TokenDecoder = Tokenizer.from_file(str(file))
    except (
        Exception
    ):  # the library raises nothing narrower, and rows are worth keeping without these texts
        return None
    return decoder


def _times(rows: Sequence[Trajectory], learned: float) -> dict[str, npt.NDArray[np.float64]]:
    """How long each row was sampled, waited for its score, was scored, and waited to be learned."""
    bounds = np.full((len(rows), 5), np.nan)
    for at, row in enumerate(rows):
        bounds[at, :2] = row.rollout_times or np.nan
        bounds[at, 2:4] = row.reward_times or np.nan
    bounds[:, 4] = learned
    spent = np.diff(bounds, axis=1)
    names = ("sample_s", "score_wait_s", "score_s", "train_wait_s")
    return {"sampled_unix_s": bounds[:, 0]} | dict(zip(names, spent.T, strict=True))


def _offsets(lengths: Sequence[int] | npt.NDArray[np.int32]) -> Any:
    """int32[rows + 1]: start of each row in the rows laid end to end."""
    import pyarrow as arrow

    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return arrow.array(offsets)


def _lists(values: Any, offsets: Any) -> Any:
    """A list column of a numpy or Arrow array; NaN becomes null."""
    import pyarrow as arrow

    if isinstance(values, np.ndarray):
        values = arrow.array(values, from_pandas=values.dtype.kind == "f")
    return arrow.ListArray.from_arrays(offsets, values)


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

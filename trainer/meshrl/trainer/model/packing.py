"""Packing: rows of many lengths laid end to end in micro-batches of a token budget, the same plan on every rank.

    batch ──groups──▶ mini-batches ──rows, balanced by tokens──▶ ranks ──token budget──▶ micro-batches

The plan is a pure function of the lengths in the manifest, so ranks agree on it without communication, and every
rank runs the same number of micro-batches: empty ones fill up, because FSDP's collectives must match.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from meshrl.common.device_lease import ROWS_PER_LAID
from meshrl.contract.types import Int32
from meshrl.trainer.model.parallel import SequenceGroup, SequenceShare
from meshrl.trainer.model.vision import PackedImages, RowImages, packed_images

BUCKET_STEPS = 8
"""Padded attention lengths per octave: at most 1/8 of a row's length is wasted."""
BUCKET_MINIMUM = 16
LONG_ROW = 2048
"""Tokens from which on a row is worth a call of attention of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """Which rank forwards which rows, in which micro-batch."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """rank -> micro-batch -> row indices (into the sizes given); every rank has equally many micro-batches."""

    def rows_of(self, rank: int) -> tuple[int, ...]:
        """The rows of a rank, in the order in which it forwards them."""
        return tuple(row for micro in self.ranks[rank] for row in micro)

    @property
    def micro_batches(self) -> int:
        """Forward passes of each rank."""
        return len(self.ranks[0])


@dataclass(frozen=True, slots=True)
class PackSize:
    """The size of rows of one group that stay together in a pack."""

    tokens: int
    """Tokens of all rows, as attention reads them."""
    own: int
    """Tokens that only these rows use."""
    group: str = ""
    shared: int = 0
    """Tokens that all rows of `group` in the pack share."""

    @property
    def laid(self) -> int:
        """Tokens of a pack that has these rows alone."""
        return self.own + self.shared


def alone(lengths: Sequence[int]) -> list[PackSize]:
    """The sizes of rows that share nothing."""
    return [PackSize(length, length) for length in lengths]


def pair_sizes(pairs: Iterable[tuple[Int32, Int32]]) -> list[PackSize]:
    """The sizes of pairs, whose rows have their common beginning laid once."""
    sizes = []
    for number, (one, other) in enumerate(pairs):
        shared, tokens = _common(one, other), len(one) + len(other)
        sizes.append(PackSize(tokens, tokens - 2 * shared, str(number), shared))
    return sizes


def plan(
    sizes: Sequence[PackSize], *, ranks: int, max_tokens: int, rows_per_laid: int = ROWS_PER_LAID
) -> PackingPlan:
    """Deal rows to `ranks` and cut each share into packs in which at most `max_tokens` are laid.

    Longest first to the least loaded rank (LPT: at most 4/3 of the best makespan). Rows that are longer than
    `max_tokens` get a pack of their own: they have to be trained somewhere.
    """
    shares = _deal(sizes, ranks)
    packs = [_cut(sizes, share, max_tokens, rows_per_laid) for share in shares]
    most = max(1, max(len(p) for p in packs))
    return PackingPlan(ranks=tuple(tuple(p) + ((),) * (most - len(p)) for p in packs))


def cut(
    sizes: Sequence[PackSize], max_tokens: int, rows_per_laid: int = ROWS_PER_LAID
) -> list[tuple[int, ...]]:
    """Rows in near the fewest packs in which at most `max_tokens` are laid; none for no rows."""
    return _cut(sizes, range(len(sizes)), max_tokens, rows_per_laid)


def cut_alike(
    rows: Sequence[Int32], max_tokens: int, rows_per_laid: int = ROWS_PER_LAID
) -> list[tuple[int, ...]]:
    """Packs of at most `max_tokens` laid tokens in which rows that begin alike are together, as far as they fit.

    A row that is longer has a pack of its own; with `max_tokens` 0 each has.
    """
    packs: list[list[int]] = []
    before, laid, tokens = np.empty(0, np.int32), 0, 0
    for row in sorted(range(len(rows)), key=lambda row: rows[row].tobytes()):
        laid += len(rows[row]) - _common(before, rows[row])
        tokens += len(rows[row])
        if not packs or laid > max_tokens or tokens > rows_per_laid * max_tokens:
            packs.append([])
            laid = tokens = len(rows[row])
        packs[-1].append(row)
        before = rows[row]
    return [tuple(sorted(pack)) for pack in packs]


def _deal(sizes: Sequence[PackSize], parts: int) -> list[list[int]]:
    """Rows to parts of near-equal sums of laid tokens; inside a part, rows keep their order."""
    heap = [(0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for row in sorted(range(len(sizes)), key=lambda r: (-sizes[r].laid, r)):
        load, part = heapq.heappop(heap)
        shares[part].append(row)
        heapq.heappush(heap, (load + sizes[row].laid, part))
    return [sorted(share) for share in shares]


class _OpenPack:
    """A pack that is being filled."""

    def __init__(self, max_tokens: int, rows_per_laid: int) -> None:
        self.rows: list[int] = []
        self.room = max_tokens
        """Tokens that may still be laid."""
        self._row_room = rows_per_laid * max_tokens
        self._shared: dict[str, int] = {}

    def add(self, row: int, size: PackSize) -> bool:
        """Take the row if there is room for it; an empty pack has room for any."""
        begun = self._shared.get(size.group, 0)
        laid = size.own + max(0, size.shared - begun)
        if self.rows and (laid > self.room or size.tokens > self._row_room):
            return False
        self.rows.append(row)
        self.room -= laid
        self._row_room -= size.tokens
        if size.shared > begun:
            self._shared[size.group] = size.shared
        return True


def _cut(
    sizes: Sequence[PackSize], share: Sequence[int], max_tokens: int, rows_per_laid: int
) -> list[tuple[int, ...]]:
    """First fit, longest first, before all where the group's prompt is laid already: near the fewest packs."""
    packs: list[_OpenPack] = []
    packs_of: defaultdict[str, list[_OpenPack]] = defaultdict(list)
    for row in sorted(share, key=lambda r: (-sizes[r].laid, r)):
        size = sizes[row]
        begun = packs_of[size.group] if size.shared else []
        for pack in itertools.chain(begun, packs):
            if pack.room >= size.own and pack.add(row, size):
                break
        else:
            pack = _OpenPack(max_tokens, rows_per_laid)
            pack.add(row, size)
            packs.append(pack)
        if pack not in begun:
            begun.append(pack)
    return [tuple(sorted(pack.rows)) for pack in packs]


def _sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device; to a GPU from pinned memory, so that the copy is asynchronous."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def attention_pairs(length: int, start: int) -> int:
    """Pairs of query and key that a rectangle computes of a row of `length`, whose queries begin at `start`.

    From the first token on, a kernel leaves out the keys behind each query; later on a mask excludes them.
    """
    return (length - start) * length if start else length * (length + 1) // 2


@dataclass(frozen=True, slots=True, eq=False)
class RowRectangle:
    """Rows of similar length, as one rectangular attention call."""

    gather: torch.Tensor
    """int64[n, L]: pack position of each table entry; entries past a row's end repeat its last token."""
    start: int
    """Column from which on entries are queries, too. Those before it are laid, and attend, with another row."""
    cells: torch.Tensor
    """int64[t]: which of the n*(L - start) queries are real tokens, and of a prefix that rows share only the first
    row's."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRun:
    """Rows as a kernel takes them end to end: the tokens that are laid with each as queries, whole rows as keys."""

    cu_queries: torch.Tensor
    """int32[rows + 1], counted from the run's first query; the last entry is their number."""
    cu_keys: torch.Tensor
    """int32[rows + 1], likewise."""
    queries: int
    keys: int
    most_queries: int
    """The most of one row."""
    longest: int
    """The most keys of one row."""
    alone: bool = False
    """One row of at least LONG_ROW tokens, of which half or more are laid with it."""

    def to(self, device: torch.device) -> RowRun:
        """The same run on another device."""
        return replace(
            self,
            cu_queries=_sent(self.cu_queries, device),
            cu_keys=_sent(self.cu_keys, device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackLayout:
    """The positions of rows in a pack, which block-diagonal attention takes instead of a mask."""

    places: npt.NDArray[np.int64]
    """[T]: pack position of each token of the rows, end to end as they were given."""
    buckets: tuple[RowRectangle, ...]
    order: torch.Tensor
    """int64[P]: index of each token of the pack in the buckets' `cells`, one bucket after the other."""
    rows: RowRun
    """All rows with tokens of their own, as these lie in the pack: its queries are the pack's tokens."""
    runs: tuple[RowRun, ...]
    """The same in parts: each long row alone, its neighbours together."""
    keys: torch.Tensor | None = None
    """int64[rows.keys]: pack position of each key of `rows`; None where the pack is just that."""
    share: SequenceShare | None = None
    """Part of the pack that this rank forwards with sequence parallelism. The layout is the whole pack's."""

    @property
    def pairs(self) -> int:
        """Pairs of query and key in the rectangles of a layer without a window."""
        return sum(
            len(b.gather) * attention_pairs(b.gather.shape[1], b.start) for b in self.buckets
        )

    def to(self, device: torch.device) -> PackLayout:
        """The same layout on another device."""
        return replace(
            self,
            buckets=tuple(
                RowRectangle(_sent(b.gather, device), b.start, _sent(b.cells, device))
                for b in self.buckets
            ),
            order=_sent(self.order, device),
            rows=self.rows.to(device),
            runs=tuple(run.to(device) for run in self.runs),
            keys=None if self.keys is None else _sent(self.keys, device),
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pack:
    """One micro-batch, ready for the model. P = tokens of the pack, N = response tokens."""

    input_ids: torch.Tensor
    """int64[1, P]"""
    position_ids: torch.Tensor
    """int64[1, P]: from 0 in each row. int64[3, 1, P] for a model in which height and width have positions, too."""
    layout: PackLayout
    positions: torch.Tensor
    """int64[N]: hidden states that predict a response token (one place before it)."""
    targets: torch.Tensor
    """int64[N]: the response tokens, row after row."""
    candidates: torch.Tensor | None = None
    """int64[N, k]: other tokens at the same places, whose log-probs a teacher's loss reads."""
    experts: torch.Tensor | None = None
    """[P, L, K]: those to send each token to, by layer; a token with the same number everywhere goes where it likes.
    None: all do."""
    images: PackedImages | None = None
    """Pictures, for a vision-language model; None: the pack has none."""

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """[N, …] of the pack's response tokens from [n, …] that this rank forwarded: all, without a `share`."""
        return values if self.layout.share is None else self.layout.share.joined(values)

    def to(self, device: torch.device) -> Pack:
        """The same pack on another device."""
        return Pack(
            input_ids=_sent(self.input_ids, device),
            position_ids=_sent(self.position_ids, device),
            layout=self.layout.to(device),
            positions=_sent(self.positions, device),
            targets=_sent(self.targets, device),
            candidates=None if self.candidates is None else _sent(self.candidates, device),
            experts=None if self.experts is None else _sent(self.experts, device),
            images=None if self.images is None else self.images.to(device),
        )


def pack(
    rows: Sequence[Int32],
    prompt_lengths: Sequence[int],
    *,
    share_prefixes: bool = True,
    candidates: Sequence[Int32] = (),
    experts: Sequence[npt.NDArray[Any]] | None = None,
    images: Sequence[RowImages] = (),
) -> Pack:
    """Lay rows end to end; the tokens from `prompt_lengths[i]` on are the response of row i.

    A common beginning of rows, as siblings of a group have, is laid once: a hidden state depends only on the tokens
    before it and on their experts, so these rows have the same states, and the gradient is the sum over the rows.
    `experts` are [T, L, K] of each row, of one type; rows share tokens up to the first difference in them.
    `candidates` are int32[T, k] of each row, or none; `images` those of the rows, for a vision-language model.
    Without rows the pack is one dummy token with no response, so that a rank without work joins the collectives.
    """
    if not rows:
        rows, prompt_lengths, experts, images = [np.zeros(1, dtype=np.int32)], [1], None, ()
    known: dict[str, int] = {}
    named = (
        [each.keys(row, known) for row, each in zip(rows, images, strict=True)] if images else rows
    )
    keys = named if experts is None else list(map(_routed, named, experts))
    places, begins = _laid(keys) if share_prefixes else _end_to_end([len(row) for row in rows])
    total = sum(len(row) - begin for row, begin in zip(rows, begins, strict=True))
    tokens = np.empty(total, dtype=np.int64)
    positions = np.empty((len(images[0].positions) if images else 1, total), dtype=np.int64)
    for index, (row, place, begin) in enumerate(zip(rows, places, begins, strict=True)):
        tokens[place[begin:]] = row[begin:]
        positions[:, place[begin:]] = (
            images[index].positions[:, begin:] if images else np.arange(begin, len(row))
        )
    numbers = None if experts is None else _placed(experts, places, total)
    answers = [max(prompt, 1) for prompt in prompt_lengths]
    predicting = [place[a - 1 : -1] for place, a in zip(places, answers, strict=True)]
    targets = [row[a:] for row, a in zip(rows, answers, strict=True)]
    return Pack(
        input_ids=torch.from_numpy(tokens)[None],
        position_ids=torch.from_numpy(positions if len(positions) == 1 else positions[:, None]),
        layout=_layout(places, begins),
        positions=torch.from_numpy(np.concatenate(predicting)),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        candidates=torch.from_numpy(
            np.concatenate([r[a:] for r, a in zip(candidates, answers, strict=True)]).astype(
                np.int64
            )
        )
        if candidates
        else None,
        experts=None if numbers is None else torch.from_numpy(numbers),
        images=packed_images(images, places, begins) if images else None,
    )


def layout_of(lengths: Sequence[int]) -> PackLayout:
    """The layout of rows of `lengths`, laid end to end."""
    return _layout(*_end_to_end(lengths))


Positions: TypeAlias = list[npt.NDArray[np.int64]]
"""Pack positions of each row's tokens."""
Rows: TypeAlias = list[tuple[npt.NDArray[np.int64], int]]
"""Positions of each row, and where in it its own tokens begin."""


def _end_to_end(lengths: Sequence[int]) -> tuple[Positions, list[int]]:
    ends = np.cumsum(lengths)
    return [np.arange(e - n, e) for e, n in zip(ends, lengths, strict=True)], [0] * len(lengths)


def _routed(row: Int32, experts: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """[T]: each token with its experts, as one thing that is the same or another."""
    tokens = np.ascontiguousarray(row, "<i4").view(np.uint8).reshape(len(row), 4)
    numbers = np.ascontiguousarray(experts).reshape(len(row), -1).view(np.uint8)
    both = np.concatenate([tokens, numbers], axis=1)
    return both.view(f"V{both.shape[1]}").reshape(-1)


def _placed(experts: Sequence[npt.NDArray[Any]], places: Positions, total: int) -> npt.NDArray[Any]:
    """[P, L, K] of the pack."""
    placed = np.empty((total, *experts[0].shape[1:]), experts[0].dtype)
    for each, place in zip(experts, places, strict=True):
        placed[place] = each
    return placed


def _laid(rows: Sequence[npt.NDArray[Any]]) -> tuple[Positions, list[int]]:
    """Places of rows whose common prefixes are laid once, and where in each row its own tokens begin.

    In sorted order a row has no longer prefix in common with any row before it than with its neighbour: a trie.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index].tobytes())
    places: Positions = [np.empty(0, dtype=np.int64)] * len(rows)
    begins = [0] * len(rows)
    end, before = 0, None
    for index in order:
        row = rows[index]
        begin = 0 if before is None else _common(rows[before], row)
        own = np.arange(end, end + len(row) - begin)
        places[index] = own if before is None else np.concatenate([places[before][:begin], own])
        begins[index], end, before = begin, end + len(own), index
    return places, begins


def _common(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """Tokens that both begin with."""
    shorter = min(len(one), len(other))
    different = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(different[0]) if len(different) else shorter


def _layout(places: Positions, begins: Sequence[int]) -> PackLayout:
    """Layout of rows at `places`, each with the tokens from `begins` on as its own."""
    both = zip(places, begins, strict=True)
    rows = [(place, begin) for place, begin in both if begin < len(place)]  # else it is another's
    rows.sort(key=lambda row: row[0][row[1]])
    members: defaultdict[tuple[int, ...], Rows] = defaultdict(list)
    for place, begin in rows:
        members[_kind(len(place), begin)].append((place, begin))
    buckets, covered = [], []
    for alike in members.values():
        n = np.array([len(place) for place, _ in alike])[:, None]
        own = np.array([begin for _, begin in alike])[:, None]
        start = int(own.min()) if _attends_apart(len(alike[0][0]), alike[0][1]) else 0
        column = np.arange(int(n.max()))
        gather = np.stack([place[np.minimum(column, len(place) - 1)] for place, _ in alike])
        real = ((column >= own) & (column < n))[:, start:]
        cells = torch.from_numpy(np.flatnonzero(real))
        buckets.append(RowRectangle(torch.from_numpy(gather), start, cells))
        covered.append(gather[:, start:][real])
    keys = None
    if any(begin for _, begin in rows):
        keys = torch.from_numpy(np.concatenate([place for place, _ in rows]))
    return PackLayout(
        np.concatenate(places),
        tuple(buckets),
        torch.from_numpy(np.argsort(np.concatenate(covered))),
        _run(rows),
        tuple(_runs(rows)),
        keys,
    )


def _attends_apart(length: int, begin: int) -> bool:
    """Whether attention takes a row's tokens from `begin` on by themselves, and does not compute all of it again."""
    return attention_pairs(length, begin) < attention_pairs(length, 0)


def _kind(length: int, begin: int) -> tuple[int, ...]:
    """Equal for rows that share a rectangle."""
    if not _attends_apart(length, begin):
        return (bucket_length(length),)
    queries = max(2 * BUCKET_MINIMUM, bucket_length(length - begin))
    return queries, begin // max(BUCKET_MINIMUM, queries // 4)


def _runs(rows: Rows) -> Iterator[RowRun]:
    for alone, together in itertools.groupby(rows, _is_alone):
        for part in [[row] for row in together] if alone else [list(together)]:
            yield replace(_run(part), alone=alone)


def _is_alone(row: tuple[npt.NDArray[np.int64], int]) -> bool:
    place, begin = row
    return len(place) >= LONG_ROW and not _attends_apart(len(place), begin)


def _run(rows: Rows) -> RowRun:
    lengths = [len(place) for place, _ in rows]
    own = [len(place) - begin for place, begin in rows]
    queries, keys = (np.cumsum([0, *each]).astype(np.int32) for each in (own, lengths))
    return RowRun(
        torch.from_numpy(queries),
        torch.from_numpy(keys),
        sum(own),
        sum(lengths),
        max(own),
        max(lengths),
    )


def bucket_length(length: int) -> int:
    """`length` rounded up to one of BUCKET_STEPS steps per octave."""
    if length <= BUCKET_MINIMUM:
        return BUCKET_MINIMUM
    step = (1 << (length - 1).bit_length()) // (2 * BUCKET_STEPS)
    return -(-length // step) * step


def share_out(pack: Pack, among: SequenceGroup) -> Pack:
    """This rank's share of `pack`, on the pack's device."""
    tokens = pack.input_ids.shape[1]
    width = math.ceil(tokens / among.size)
    owners = torch.div(pack.positions, width, rounding_mode="floor")
    counts = torch.bincount(owners, minlength=among.size).tolist()
    begin = among.rank * width
    padding = (0, among.size * width - tokens)
    own = owners == among.rank
    experts = pack.experts
    if experts is not None:
        experts = F.pad(experts, (0, 0, 0, 0, *padding))[begin : begin + width]
    share = SequenceShare(among=among, tokens=tokens, width=width, counts=tuple(counts))
    return replace(
        pack,
        input_ids=F.pad(pack.input_ids, padding)[:, begin : begin + width],
        position_ids=F.pad(pack.position_ids, padding)[..., begin : begin + width],
        layout=replace(pack.layout, share=share),
        positions=pack.positions[own] - begin,
        targets=pack.targets[own],
        candidates=None if pack.candidates is None else pack.candidates[own],
        experts=experts,
        images=None if pack.images is None else pack.images.share(begin, width),
    )

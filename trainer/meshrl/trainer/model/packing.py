"""Packing: rows of many lengths laid end to end in micro-batches of a token budget, the same plan on every rank.

    batch ──groups──▶ mini-batches ──rows, balanced by tokens──▶ ranks ──token budget──▶ micro-batches

The plan is a pure function of the lengths in the manifest, so ranks agree on it without a word, and every
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
    """Those that are laid for these rows alone."""
    group: str = ""
    shared: int = 0
    """Those that are laid once for all rows of `group` in the pack."""

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


def plan(sizes: Sequence[PackSize], *, ranks: int, max_tokens: int) -> PackingPlan:
    """Deal rows to `ranks` and cut each share into packs in which at most `max_tokens` are laid.

    Longest first to the least loaded rank (LPT: at most 4/3 of the best makespan). Rows that are longer than
    `max_tokens` get a pack of their own: they have to be trained somewhere.
    """
    shares = _deal(sizes, ranks)
    packs = [_cut(sizes, share, max_tokens) for share in shares]
    most = max(1, max(len(p) for p in packs))
    return PackingPlan(ranks=tuple(tuple(p) + ((),) * (most - len(p)) for p in packs))


def cut(sizes: Sequence[PackSize], max_tokens: int) -> list[tuple[int, ...]]:
    """Rows in near the fewest packs in which at most `max_tokens` are laid; none for no rows."""
    return _cut(sizes, range(len(sizes)), max_tokens)


def cut_alike(rows: Sequence[Int32], max_tokens: int) -> list[tuple[int, ...]]:
    """Packs of at most `max_tokens` laid tokens in which rows that begin alike stand together, as far as they fit.

    A row that is longer has a pack of its own; with `max_tokens` 0 each has.
    """
    packs: list[list[int]] = []
    before, laid, tokens = np.empty(0, np.int32), 0, 0
    for row in sorted(range(len(rows)), key=lambda row: rows[row].tobytes()):
        laid += len(rows[row]) - _common(before, rows[row])
        tokens += len(rows[row])
        if not packs or laid > max_tokens or tokens > ROWS_PER_LAID * max_tokens:
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

    def __init__(self, max_tokens: int) -> None:
        self.rows: list[int] = []
        self.room = max_tokens
        """Tokens that may still be laid."""
        self._row_room = ROWS_PER_LAID * max_tokens
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


def _cut(sizes: Sequence[PackSize], share: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
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
            pack = _OpenPack(max_tokens)
            pack.add(row, size)
            packs.append(pack)
        if pack not in begun:
            begun.append(pack)
    return [tuple(sorted(pack.rows)) for pack in packs]


def _sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device; to a GPU from pinned memory, so that nobody waits for the copy."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


@dataclass(frozen=True, slots=True, eq=False)
class RowRectangle:
    """Rows of similar length, as one rectangular attention call."""

    gather: torch.Tensor
    """int64[n, L]: pack position of each table entry; entries past a row's end repeat its last token."""
    cells: torch.Tensor
    """int64[t]: which of the n*L cells are real tokens, and of a prefix that rows share only the first row's."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRun:
    """A row of at least LONG_ROW tokens, or neighbours that are shorter, as attention takes them end to end."""

    cu_seqlens: torch.Tensor
    """int32[rows + 1], counted from its first token."""
    tokens: int
    longest: int


@dataclass(frozen=True, slots=True, eq=False)
class PackLayout:
    """How the rows of one pack lie: what block-diagonal attention needs instead of a mask."""

    cu_seqlens: torch.Tensor
    """int32[S+1]: starts of rows, laid end to end and each with its prefix; the last entry is the total."""
    max_seqlen: int
    buckets: tuple[RowRectangle, ...]
    runs: tuple[RowRun, ...]
    """All rows, in their order; a single one for a pack without long rows."""
    order: torch.Tensor
    """int64[P]: index of each token of the pack in the buckets' `cells`, one bucket after the other."""
    unfolded: torch.Tensor | None = None
    """int64[cu_seqlens[-1]]: pack position of each token of the rows end to end; None where the pack is just that."""
    folded: torch.Tensor | None = None
    """int64[P]: the way back, to one of the places at which a token of the pack stands."""
    share: SequenceShare | None = None
    """Part of the pack that this rank forwards with sequence parallelism. The layout is the whole pack's."""

    def to(self, device: torch.device) -> PackLayout:
        """The same layout on another device."""
        return replace(
            self,
            cu_seqlens=_sent(self.cu_seqlens, device),
            buckets=tuple(
                RowRectangle(_sent(b.gather, device), _sent(b.cells, device)) for b in self.buckets
            ),
            runs=tuple(replace(r, cu_seqlens=_sent(r.cu_seqlens, device)) for r in self.runs),
            order=_sent(self.order, device),
            unfolded=None if self.unfolded is None else _sent(self.unfolded, device),
            folded=None if self.folded is None else _sent(self.folded, device),
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

    Rows that begin alike, as the siblings of a group do, have what they share laid once: a hidden state depends on
    the tokens before it, and the experts that they are sent to, alone, so it is one and the same, and its gradient
    the sum over the rows. `experts` are [T, L, K] of each row, of one type; where they differ, sharing ends.
    `candidates` are int32[T, k] of each row, or none; `images` those of the rows, where the model reads pictures.
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
    sizes = np.array([len(place) for place in places], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    members: dict[int, list[int]] = {}
    for index, size in enumerate(sizes):
        if begins[index] < size:  # else all of it is another row's
            members.setdefault(bucket_length(int(size)), []).append(index)
    buckets, covered = [], []
    unfolded = np.concatenate(places)
    for indices in members.values():
        n, first = sizes[indices][:, None], starts[indices][:, None]
        column = np.arange(int(n.max()))[None]
        gather = unfolded[first + np.minimum(column, n - 1)]
        real = (column >= np.asarray(begins)[indices][:, None]) & (column < n)
        buckets.append(
            RowRectangle(torch.from_numpy(gather), torch.from_numpy(np.flatnonzero(real)))
        )
        covered.append(gather[real])
    order = np.argsort(np.concatenate(covered))
    folded = None
    if any(begins) or (np.diff(unfolded) != 1).any():
        folded = np.empty(len(order), dtype=np.int64)
        folded[unfolded] = np.arange(len(unfolded))
    return PackLayout(
        torch.from_numpy(starts.astype(np.int32)),
        int(sizes.max()),
        tuple(buckets),
        tuple(_runs(starts)),
        torch.from_numpy(order),
        unfolded=None if folded is None else torch.from_numpy(unfolded),
        folded=None if folded is None else torch.from_numpy(folded),
    )


def _runs(starts: npt.NDArray[np.int64]) -> Iterator[RowRun]:
    """Runs of rows that begin at `starts`; its last entry is the end of the last row."""
    lengths = np.diff(starts)
    for long, rows in itertools.groupby(range(len(lengths)), lambda row: lengths[row] >= LONG_ROW):
        together = list(rows)
        for part in [[row] for row in together] if long else [together]:
            ends = starts[part[0] : part[-1] + 2] - starts[part[0]]
            where = torch.from_numpy(ends.astype(np.int32))
            yield RowRun(where, int(ends[-1]), int(lengths[part].max()))


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

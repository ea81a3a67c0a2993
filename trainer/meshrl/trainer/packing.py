"""Packing: rows of many lengths laid end to end in micro-batches of a token budget, the same plan on every rank.

    batch ──groups──▶ mini-batches ──rows, balanced by tokens──▶ ranks ──token budget──▶ micro-batches

The plan is a pure function of the row lengths in the manifest, so ranks agree on it without a word, and every
rank runs the same number of micro-batches: empty ones fill up, because FSDP's collectives must match.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshrl.contract.nouns import Int32
from meshrl.trainer.sequence import Share

BUCKET_STEPS = 8
"""Padded attention lengths per octave: at most 1/8 of a row's length is wasted."""
BUCKET_MINIMUM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which rank forwards which rows, in which micro-batch."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """rank -> micro-batch -> row indices (into the lengths given); every rank has equally many micro-batches."""

    def rows_of(self, rank: int) -> tuple[int, ...]:
        """The rows of a rank, in the order in which it forwards them."""
        return tuple(row for micro in self.ranks[rank] for row in micro)

    @property
    def micro_batches(self) -> int:
        """Forward passes of each rank."""
        return len(self.ranks[0])


def plan(lengths: Sequence[int], *, ranks: int, max_tokens: int) -> Plan:
    """Deal rows of `lengths` tokens to `ranks` and cut each share into packs of at most `max_tokens`.

    Longest first to the least loaded rank (LPT: at most 4/3 of the best makespan). A row longer than `max_tokens`
    gets a pack of its own: it has to be trained somewhere.
    """
    shares = _deal(lengths, range(len(lengths)), ranks)
    packs = [_cut(lengths, share, max_tokens) for share in shares]
    most = max(1, max(len(p) for p in packs))
    return Plan(ranks=tuple(tuple(p) + ((),) * (most - len(p)) for p in packs))


def cut(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
    """Rows of `lengths` tokens in near the fewest packs of at most `max_tokens`; none for no rows."""
    return _cut(lengths, range(len(lengths)), max_tokens)


def _deal(lengths: Sequence[int], rows: Sequence[int], parts: int) -> list[list[int]]:
    """Rows to parts of near-equal token sums; inside a part, rows keep their order."""
    heap = [(0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        load, part = heapq.heappop(heap)
        shares[part].append(row)
        heapq.heappush(heap, (load + lengths[row], part))
    return [sorted(share) for share in shares]


def _cut(lengths: Sequence[int], share: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
    """First fit, longest first: near the fewest packs that hold the share, each within the budget."""
    packs: list[list[int]] = []
    loads: list[int] = []
    for row in sorted(share, key=lambda r: (-lengths[r], r)):
        for index, load in enumerate(loads):
            if load + lengths[row] <= max_tokens:
                packs[index].append(row)
                loads[index] += lengths[row]
                break
        else:
            packs.append([row])
            loads.append(lengths[row])
    return [tuple(sorted(pack)) for pack in packs]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Sequences of similar length, as one rectangular attention call."""

    gather: torch.Tensor
    """int64[n, L]: pack position of each cell; cells past a sequence's end repeat its last token."""
    cells: torch.Tensor
    """int64[t]: which of the n*L cells are real tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How the sequences of one pack lie: what block-diagonal attention needs instead of a mask."""

    cu_seqlens: torch.Tensor
    """int32[S+1]: where sequences begin; the last entry is the total."""
    max_seqlen: int
    buckets: tuple[Bucket, ...]
    order: torch.Tensor
    """int64[P]: where in the buckets' `cells`, one bucket after the other, each token of the pack stands."""
    share: Share | None = None
    """With sequence parallelism: the part of the pack that this rank forwards. The layout is the whole pack's."""

    def to(self, device: torch.device) -> Layout:
        """The same layout on another device."""
        buckets = (Bucket(b.gather.to(device), b.cells.to(device)) for b in self.buckets)
        return Layout(
            self.cu_seqlens.to(device),
            self.max_seqlen,
            tuple(buckets),
            self.order.to(device),
            self.share,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pack:
    """One micro-batch, ready for the model. P = tokens of the pack, N = response tokens."""

    input_ids: torch.Tensor
    """int64[1, P]"""
    position_ids: torch.Tensor
    """int64[1, P]: from 0 in each sequence."""
    layout: Layout
    positions: torch.Tensor
    """int64[N]: hidden states that predict a response token (one place before it)."""
    targets: torch.Tensor
    """int64[N]: the response tokens, row after row."""

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """[N] of the pack's response tokens from [n] of those that this rank forwarded (all, but for a `share`)."""
        return values if self.layout.share is None else self.layout.share.joined(values)

    def to(self, device: torch.device) -> Pack:
        """The same pack on another device."""
        return Pack(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            layout=self.layout.to(device),
            positions=self.positions.to(device),
            targets=self.targets.to(device),
        )


def pack(rows: Sequence[Int32], prompt_lengths: Sequence[int]) -> Pack:
    """Lay rows end to end; the tokens from `prompt_lengths[i]` on are the response of row i.

    Without rows the pack is one dummy token with no response, so that a rank without work joins the collectives.
    """
    if not rows:
        rows, prompt_lengths = [np.zeros(1, dtype=np.int32)], [1]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.concatenate([np.arange(n) for n in lengths])
    targets = [
        np.arange(start + max(prompt, 1), start + n)
        for start, prompt, n in zip(starts, prompt_lengths, lengths, strict=False)
    ]
    target_places = np.concatenate(targets).astype(np.int64)
    tokens = np.concatenate(rows).astype(np.int64)
    return Pack(
        input_ids=torch.from_numpy(tokens)[None],
        position_ids=torch.from_numpy(positions)[None],
        layout=layout_of(lengths.tolist()),
        positions=torch.from_numpy(target_places - 1),
        targets=torch.from_numpy(tokens[target_places]),
    )


def layout_of(lengths: Sequence[int]) -> Layout:
    """The layout of sequences of `lengths`, laid end to end."""
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    members: dict[int, list[int]] = {}
    for index, size in enumerate(sizes):
        members.setdefault(_bucket_length(int(size)), []).append(index)
    buckets, places = [], []
    for indices in members.values():
        n = sizes[indices]
        widest = int(n.max())
        column = np.arange(widest)
        gather = starts[indices][:, None] + np.minimum(column[None], n[:, None] - 1)
        real = column[None] < n[:, None]
        buckets.append(Bucket(torch.from_numpy(gather), torch.from_numpy(np.flatnonzero(real))))
        places.append(gather[real])
    return Layout(
        torch.from_numpy(starts.astype(np.int32)),
        int(sizes.max()),
        tuple(buckets),
        torch.from_numpy(np.argsort(np.concatenate(places))),
    )


def _bucket_length(length: int) -> int:
    """`length` rounded up to one of BUCKET_STEPS steps per octave."""
    if length <= BUCKET_MINIMUM:
        return BUCKET_MINIMUM
    step = (1 << (length - 1).bit_length()) // (2 * BUCKET_STEPS)
    return -(-length // step) * step

"""Forward passes over a rank's rows of one batch, for policy, critic and reward model alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshrl.contract.types import Trajectory
from meshrl.trainer.learner.experience import MiniBatch, Schedule, gather_tokens
from meshrl.trainer.model.packing import Pack, pack, share_out
from meshrl.trainer.model.routing import Routing
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World

WHOLE_GRADIENTS_SHARE = 8
"""Gradients of the whole model may take this part of a device: 10 GB of 80, those of 2.5 billion weights."""


class _Packs:
    """Packs in order: the next one is laid out, and sent to the device, while that computes."""

    def __init__(
        self, pack: Callable[[Sequence[int]], Pack], parts: Iterable[Sequence[int]]
    ) -> None:
        self._packs = map(pack, parts)
        self._next: Pack | None = None

    def take(self) -> Pack:
        """The next one."""
        ready, self._next = self._next, None
        return ready or next(self._packs)

    def prepare(self) -> None:
        """Lay out the one after it; call this when the device has work."""
        self._next = next(self._packs, None)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatcher:
    """The rows that this rank forwards."""

    schedule: Schedule
    rows: Mapping[int, Trajectory]
    """Rows by their index in the schedule."""
    world: World
    routing: Routing | None = None
    """Replay of the experts that the rows record; None: the model routes freely."""
    reader: VisionReader | None = None
    """Set for vision-language models."""

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        own: Sequence[Trajectory],
        world: World,
        routing: Routing | None = None,
        reader: VisionReader | None = None,
    ) -> MicroBatcher:
        """`own` are the rows of `schedule.own(world.data_rank)`, in order."""
        rows = dict(zip(schedule.own(world.data_rank), own, strict=True))
        return cls(schedule, rows, world, routing, reader)

    def pack(self, chosen: Sequence[int]) -> Pack:
        """One micro-batch, on the device; with sequence parallelism this rank's share of its tokens."""
        picked = [self.rows[row] for row in chosen]
        among, routing = self.world.sequence, self.routing
        packed = pack(
            [row.tokens for row in picked],
            [row.prompt_length for row in picked],
            share_prefixes=among is None,  # a share of the tokens must hold what its rows attend to
            candidates=[row.ref_top_ids for row in picked if row.ref_top_ids is not None],
            experts=None if routing is None else [routing.of(row) for row in picked],
            images=[self.reader.of_row(row) for row in picked] if self.reader else (),
        ).to(self.world.device)
        return packed if among is None else share_out(packed, among)

    def teacher(self, chosen: Sequence[int]) -> torch.Tensor:
        """float32[n, k], on the device: the teacher's log-probs of the pack's candidates."""
        rows = [self.rows[row] for row in chosen]
        parts = [
            row.ref_top_logprobs[max(row.prompt_length, 1) :]
            for row in rows
            if row.ref_top_logprobs is not None
        ]
        return torch.from_numpy(np.concatenate(parts)).to(self.world.device)

    def micro_batches(
        self,
        mini: MiniBatch,
        model: nn.Module,
        forward: Callable[[Pack], tuple[torch.Tensor, ...]],
    ) -> Iterator[tuple[Sequence[int], tuple[torch.Tensor, ...]]]:
        """This rank's micro-batches that have rows, each with the result of `forward`: a backward pass must follow.

        Every rank calls this; a rank's backward passes are as many as its peers'. Where memory allows, the gradients
        of `model`, which `forward` calls, meet those of the peers in the last one only.
        """
        parts = mini.ranks[self.world.data_rank]
        once = isinstance(model, FSDPModule) and reduces_once(model, self.world)
        packs = _Packs(self.pack, parts)
        for index, chosen in enumerate(parts):
            if once and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(index == len(parts) - 1)
            outputs = forward(packs.take())
            packs.prepare()
            if chosen:
                yield chosen, outputs
            else:
                # This rank has no rows left, but its peers' collectives need its backward pass.
                outputs[0].sum().backward()  # type: ignore[no-untyped-call]

    def split(self, values: torch.Tensor, chosen: Sequence[int]) -> Sequence[torch.Tensor]:
        """A micro-batch's [n], cut into its rows, on the CPU."""
        sizes = [len(self.rows[row].tokens) - self.rows[row].prompt_length for row in chosen]
        return torch.split(values.detach().cpu(), sizes) if chosen else ()

    @torch.no_grad()
    def forward(self, model: nn.Module, function: Callable[[Pack], torch.Tensor]) -> torch.Tensor:
        """float32[N] of the whole batch from a function of packs that calls `model`; every rank calls this."""
        of_row: dict[int, torch.Tensor] = {}
        every = [c for mini in self.schedule.mini_batches for c in mini.ranks[self.world.data_rank]]
        packs = _Packs(self.pack, every)
        for chosen in every:
            values = function(packs.take())
            packs.prepare()
            of_row.update(zip(chosen, self.split(values, chosen), strict=True))
        if isinstance(model, FSDPModule):
            # FSDP leaves the root gathered for a backward pass, which does not follow: the next reader
            # of the parameters would get them in the compute type.
            model.reshard()
        return gather_tokens(self.schedule, [of_row[row] for row in self.rows], self.world)


def reduces_once(model: nn.Module, world: World) -> bool:
    """Whether ranks add up their gradients once for an optimizer step, and not for each micro-batch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    offloaded = any(parameter.device.type != world.device.type for parameter in trained)
    numbers = sum(parameter.numel() for parameter in trained)
    return world.size > 1 and not offloaded and allows_whole_gradients(numbers, world.memory)


def allows_whole_gradients(numbers: int, memory: int) -> bool:
    """Whether each rank has room for the gradients of the whole model in float32, beside what it needs anyway."""
    return 4 * numbers <= memory // WHOLE_GRADIENTS_SHARE

"""The frozen model of KL terms; several ranks of a machine may share its weights (FSDP), rank 0 says what to forward.

rank 0    rows ──broadcast──▶ every rank: forwards its share of the micro-batches ──gather──▶ rank 0
silence   rank 0 says so every IDLE_S, since a collective that waits longer than CONTROL_TIMEOUT_S fails
the end   rank 0 says so; a rank that dies fails the next collective of the others
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import register_fsdp_forward_method

from meshrl.common.device_lease import chosen_device
from meshrl.contract.errors import (
    InfraError,
    UserError,
)
from meshrl.contract.types import (
    REFERENCE_TOP,
    Columns,
    Int32,
    Media,
)
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.attention import rows_per_laid
from meshrl.trainer.model.packing import cut_alike, pack
from meshrl.trainer.model.packing_check import HfModel
from meshrl.trainer.model.policy import Policy, open_hf
from meshrl.trainer.model.sharding import fill, is_empty, shard
from meshrl.trainer.model.vision import RowImages, VisionReader, tower_of
from meshrl.trainer.ranks.world import World, prepare_cuda

IDLE_S = 60.0
_END = b"end"

Micro = TypeVar("Micro")
"""The rows that are forwarded at once."""


def sharded(hf: HfModel, world: World, config: ModelConfig) -> Policy:
    """The frozen model, each rank with its share of every layer, of which one at a time is whole."""
    policy = shard(Policy(hf).eval().requires_grad_(False), hf, world, config)
    policy.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]  # an FSDPModule now
    register_fsdp_forward_method(policy, "top")
    return policy


class ReferenceRanks:
    """Messages between the ranks. Rank 0 calls `send`, `idle` and `end`, the others `receive`; all call the rest."""

    def __init__(self, world: World) -> None:
        self._world = world

    def idle(self) -> None:
        """Rank 0 has nothing to forward."""
        self._world.broadcast()

    def end(self) -> None:
        """There is nothing more to forward."""
        self._world.broadcast(_END)

    def send(self, rows: Sequence[Int32], temperature: float, top: int) -> None:
        """Send rows to the other ranks, which `receive` them."""
        head = {"lengths": [len(row) for row in rows], "temperature": temperature, "top": top}
        tokens = np.concatenate(rows).astype("<i4").tobytes()
        self._world.broadcast(json.dumps(head).encode() + b"\n" + tokens)

    def receive(self) -> tuple[list[Int32], float, int] | None:
        """The next rows with their temperature, and how many of the likeliest tokens are wanted; None at the end.

        Raises:
            InfraError: rank 0 is gone.
        """
        while not (message := self._world.broadcast()):
            pass
        if message == _END:
            return None
        head, _, tokens = message.partition(b"\n")
        said = json.loads(head)
        every = np.frombuffer(tokens, "<i4").astype(np.int32)
        ends = np.cumsum(said["lengths"])[:-1]
        return np.split(every, ends), said["temperature"], said["top"]

    def own(self, micros: Sequence[Micro]) -> list[Micro]:
        """The micro-batches that this rank forwards: every so manyth.

        All ranks forward equally often, since all put a layer together: a last one too many counts for nothing.
        """
        rank, size = self._world.rank, self._world.size
        rounds = [micros[first : first + size] for first in range(0, len(micros), size)]
        return [each[min(rank, len(each) - 1)] for each in rounds]

    def gathered(
        self, found: Sequence[tuple[torch.Tensor, ...]], count: int
    ) -> list[tuple[torch.Tensor, ...]]:
        """Gather the ranks' results of their `own` of `count` micro-batches: tensors on the CPU, of tokens first."""
        world = self._world
        mine = found[: len(range(world.rank, count, world.size))]
        every: list[tuple[torch.Tensor, ...]] = [()] * count
        for kind, like in enumerate(found[0]):
            parts = [each[kind] for each in mine]
            flat = torch.cat([part.reshape(-1) for part in parts] or [like.reshape(-1)[:0]])
            sizes = world.all_gather(np.array([len(part) for part in parts], dtype=np.int64))
            for rank, values in enumerate(world.all_gather(flat.numpy())):
                whole = torch.from_numpy(values).reshape(-1, *like.shape[1:])
                split = torch.split(whole, sizes[rank].tolist()) if len(sizes[rank]) else ()
                for number, part in zip(range(rank, count, world.size), split, strict=True):
                    every[number] = (*every[number], part)
        return every


class ReferenceModel:
    """Log-probabilities of given tokens under a frozen model.

    `deterministic` forwards each row alone: its result then depends on nothing that is computed beside it.
    """

    def __init__(
        self,
        path: Path,
        *,
        param_dtype: str = "float32",
        max_tokens: int = 16_384,
        deterministic: bool = False,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        trust_remote_code: bool = False,
        world: World | None = None,
    ) -> None:
        """Load it; with a `world` of several ranks each loads its share, and the others `follow` rank 0."""
        kind = chosen_device("trainer.device", device, torch)
        if kind == "cuda":
            prepare_cuda()
        self._device = torch.device(kind)
        hf = open_hf(path, getattr(torch, param_dtype), trust_remote_code=trust_remote_code)
        self._vocabulary = int(hf.get_output_embeddings().weight.shape[0])
        self._ranks: ReferenceRanks | None = None
        if world is not None and world.size > 1:
            if tower_of(hf) is not None:
                raise UserError(
                    f"reference.nproc: {path} is a vision-language model, and its ranks get no images; want 1"
                )
            self._device, self._ranks = world.device, ReferenceRanks(world)
            how = {"param_dtype": param_dtype, "enable_gradient_checkpointing": False}
            self._policy = sharded(hf, world, ModelConfig.model_validate({"path": path, **how}))
        else:
            if is_empty(hf):
                fill(hf, hf, ModelConfig(path=path), self._device)
            self._policy = Policy(hf.to(self._device)).eval().requires_grad_(False)
        self._reader = VisionReader(path, hf) if self._policy.tower is not None else None
        self._max_tokens = max_tokens
        self._deterministic = deterministic
        # One thread: forwards do not overlap, and the event loop stays free to renew leases.
        self._thread = ThreadPoolExecutor(1, "reference", self._enter)

    def _enter(self) -> None:
        if self._device.index is not None:  # the current device is a property of the thread
            torch.cuda.set_device(self._device)

    @property
    def reads_pictures(self) -> bool:
        """Whether it reads those of rows."""
        return self._reader is not None

    async def judged(
        self,
        rows: Sequence[Int32],
        seen: Sequence[Seen] = (),
        *,
        temperature: float = 1.0,
        top: int = 0,
    ) -> Sequence[Columns]:
        """For each int32[T] the column `ref_logprobs`, and those of REFERENCE_TOP, of the `top` likeliest tokens.

        `seen` has the pictures of each row, where any may have some.

        Raises:
            UserError: an empty row, a token outside the vocabulary, or pictures that are not those of their row.
        """
        if self._reader is None and any(each.media for each in seen):
            raise UserError("rows have pictures, and the reference reads text only")
        for index, row in enumerate(rows):
            if len(row) == 0:
                raise UserError(f"row {index} has no tokens")
            if int(row.min()) < 0 or int(row.max()) >= self._vocabulary:
                raise UserError(
                    f"row {index}: token ids {row.min()}..{row.max()}, vocabulary {self._vocabulary}: "
                    "the reference's tokenizer is not the policy's"
                )
        loop = asyncio.get_running_loop()
        forward = self._forward if self._ranks is None else self._together
        return await loop.run_in_executor(self._thread, forward, rows, seen, temperature, top)

    def follow(self) -> None:
        """On another rank than the first: compute the batches that the first one sends, until its end.

        Raises:
            InfraError: it is gone.
        """
        assert self._ranks is not None
        while (said := self._ranks.receive()) is not None:
            rows, temperature, top = said
            self._forward(rows, (), temperature, top)

    async def keep_ranks(self) -> None:
        """On rank 0 of several, for as long as it serves: the others hear from it at times."""
        assert self._ranks is not None
        while True:
            await asyncio.sleep(IDLE_S)
            await asyncio.get_running_loop().run_in_executor(self._thread, self._ranks.idle)

    def close(self) -> None:
        """End the thread, and what the other ranks wait for; idempotent."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            with suppress(InfraError):  # they have ended already
                self._thread.submit(ranks.end).result()
        self._thread.shutdown()

    def _together(
        self,
        rows: Sequence[Int32],
        seen: Sequence[Seen],
        temperature: float,
        top: int,
    ) -> list[Columns]:
        assert self._ranks is not None
        self._ranks.send(rows, temperature, top)
        return self._forward(rows, seen, temperature, top)

    @torch.no_grad()
    def _forward(
        self,
        rows: Sequence[Int32],
        seen: Sequence[Seen],
        temperature: float,
        top: int,
    ) -> list[Columns]:
        most = 0 if self._deterministic else self._max_tokens
        keys, numbers = list(rows), dict[str, int]()
        if reader := self._reader:  # beside other pictures, equal tokens are not alike
            for index, (row, one) in enumerate(zip(rows, seen, strict=False)):
                keys[index] = reader.keys(row, one.sampled, one.media, f"row {index}", numbers)
        micros = [*cut_alike(keys, most, rows_per_laid(self._policy.hf))]
        every: list[tuple[torch.Tensor, ...]] = []
        for micro in micros if self._ranks is None else self._ranks.own(micros):
            chosen = [rows[index] for index in micro]
            images: list[RowImages] = []
            if reader is not None:
                for index in micro:
                    one = seen[index] if seen else Seen(np.zeros_like(rows[index]))
                    where = f"row {index}"
                    images.append(reader.images(rows[index], one.sampled, one.media, where))
            packed = pack(chosen, [1] * len(chosen), images=images).to(self._device)
            found = self._policy.top(packed, temperature, top)
            every.append(tuple([each.cpu() for each in found]))
        if self._ranks is not None:
            every = self._ranks.gathered(every, len(micros))
        results: list[Columns] = [{}] * len(rows)
        for micro, found in zip(micros, every, strict=True):
            sizes = [len(rows[index]) - 1 for index in micro]
            # The first token of a row has none before it.
            columns = [
                [F.pad(part, (0, 0) * (part.dim() - 1) + (1, 0)).numpy() for part in parts]
                for parts in zip(*(torch.split(each, sizes) for each in found), strict=True)
            ]
            for index, of_row in zip(micro, columns, strict=True):
                results[index] = dict(zip(("ref_logprobs", *REFERENCE_TOP), of_row, strict=False))
        return results


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The pictures of a row."""

    sampled: npt.NDArray[Any]
    """[T]: not 0 where the policy sampled the token, which is no place for a picture then."""
    media: tuple[Media, ...] = ()

"""The frozen model of KL terms, and the stage that adds `ref_logprobs` to rows.

queue ─lease(tokens)─▶ SharedPrefixGroups ─whole groups─▶ ReferenceModel: packed forward ─ref_logprobs─▶ queue
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from meshrl.common.device_share import chosen_device
from meshrl.contract.errors import (
    CorruptError,
    InfraError,
    NotFoundError,
    UserError,
)
from meshrl.contract.ports import Queue
from meshrl.contract.rows import media_of_row, row_media
from meshrl.contract.stage_worker import Failure, StageResult, StageStats, StageWorker
from meshrl.contract.types import (
    REFERENCE_STAGE,
    REFERENCE_TOP,
    ROW_MEDIA,
    Columns,
    Int32,
    LeasedRow,
    Media,
    Outcome,
    RowWrite,
)
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.packing import cut_alike, pack
from meshrl.trainer.model.policy import Policy, open_hf
from meshrl.trainer.model.sharded_loading import fill, is_empty
from meshrl.trainer.model.vision import RowImages, VisionReader, tower_of
from meshrl.trainer.ranks.world import World, prepare_cuda
from meshrl.trainer.reference.ranks import IDLE_S, ReferenceRanks, sharded
from meshrl.trainer.reference.shared_prefix_groups import SharedPrefixGroups


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
                    f"reference.nproc: {path} reads pictures, which its ranks are not sent; want 1"
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
        """For each int32[T] the column `ref_logprobs`, and with `top` those of REFERENCE_TOP, of so many tokens.

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
        """On another rank than the first: forward what it says, until it says that this is the end.

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
        micros = [*cut_alike(rows, 0 if self._deterministic else self._max_tokens)]
        every: list[tuple[torch.Tensor, ...]] = []
        for micro in micros if self._ranks is None else self._ranks.own(micros):
            chosen = [rows[index] for index in micro]
            images: list[RowImages] = []
            if reader := self._reader:
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


class Judge(Protocol):
    """From the tokens of rows, and the pictures of each, to their columns."""

    async def __call__(
        self, rows: Sequence[Int32], seen: Sequence[Seen], *, temperature: float
    ) -> Sequence[Columns]:
        """One mapping of columns a row."""
        ...


class ReferenceStage:
    """Leases rows that lack a reference's columns and writes them, until drained."""

    def __init__(
        self,
        queue: Queue,
        runs: Sequence[str],
        judged: Judge,
        *,
        worker: str,
        limit: int = 1024,
        together: bool = True,
        pictures: bool = False,
    ) -> None:
        """Prepare; nothing is leased before `run`.

        Args:
            queue: Where rows come from.
            runs: Which runs' rows.
            judged: What computes.
            pictures: It reads those of rows.
            worker: This stage's name in leases.
            limit: Rows held at once: most of them wait for the rest of their group.
            together: Rows wait for the rest of their group, whose prompt is shared (`SharedPrefixGroups`).
        """
        self._queue = queue if pictures else None
        self._judged = judged
        self._loop = StageWorker(
            queue,
            runs,
            REFERENCE_STAGE,
            SharedPrefixGroups(self._handle).results if together else self._handle,
            worker=worker,
            limit=limit,
            by_group=together,
            rows_per_call=32,
        )

    @property
    def stats(self) -> StageStats:
        """Rows leased, written, failed and lost since the start."""
        return self._loop.stats

    def drain(self) -> None:
        """Lease no more; `run` returns when the held rows are written."""
        self._loop.drain()

    async def run(self, *, grace_s: float = 30.0) -> None:
        """Work until drained."""
        await self._loop.run(grace_s=grace_s)

    async def _handle(self, rows: Sequence[LeasedRow]) -> Sequence[StageResult]:
        """Batch rows by temperature: the policy's logits are divided by it, so these are too."""
        by_temperature: dict[float, list[LeasedRow]] = defaultdict(list)
        for row in rows:
            by_temperature[row.task.sampling.temperature or 1.0].append(row)
        results: list[StageResult] = []
        for temperature, part in by_temperature.items():
            results.extend(await self._answer(part, temperature))
        return results

    async def _answer(self, rows: Sequence[LeasedRow], temperature: float) -> list[StageResult]:
        tokens = [row.columns["tokens"] for row in rows]
        try:
            seen = await self._seen(rows)
            results = await self._judged(tokens, seen, temperature=temperature)
        except (UserError, CorruptError, NotFoundError) as error:  # not found: gone meanwhile
            if len(rows) > 1:  # one row's defect must not fail the others
                return [r for row in rows for r in await self._answer([row], temperature)]
            return [Failure(uid=rows[0].uid, outcome=Outcome.INFRA_FAULT, reason=str(error))]
        return [
            RowWrite(uid=row.uid, columns=columns)
            for row, columns in zip(rows, results, strict=True)
        ]

    async def _seen(self, rows: Sequence[LeasedRow]) -> list[Seen]:
        """The pictures of rows, with those that an environment answered with."""
        if self._queue is None:
            return []
        found: list[Columns] = []
        for run, part in itertools.groupby([row.uid for row in rows], key=lambda uid: uid.run):
            found += await self._queue.fetch(run, list(part), ("loss_mask", ROW_MEDIA))
        return [
            Seen(columns["loss_mask"], media_of_row(row.uid, row_media(columns), row.task.media))
            for row, columns in zip(rows, found, strict=True)
        ]

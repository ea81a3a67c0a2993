"""Is every token labelled with the version that sampled it? Weights that say their version, updated under fire.

    python -m tests.chaos.labels --tokens 1000000 --kills 20 --seed 1

Real rollout services (torch engine, journal, weight plane) sample from a model that can say one token only, and which
one is decided by the weights: those of version 1.s say token s, modulo the vocabulary. A new version comes every
few hundred milliseconds, into running responses; rollout processes are killed with -9 meanwhile, and others continue
with what was journaled. Whoever trains compares every token with its label. The last line is one JSON object; exit
code 0: no token was mislabelled.

    driver: queue, weight plane, judge, trainer ══ gRPC ══ meshrl serve rollout (several, killed and started again)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml

from meshrl.config import load_recipe
from meshrl.config.stages import train_spec
from meshrl.contract import rows
from meshrl.contract.stage_worker import Intake, StageResult, StageWorker
from meshrl.contract.types import (
    ROLLOUT_COLUMNS,
    LeasedRow,
    Outcome,
    SamplingParams,
    Score,
    Task,
    Trajectory,
    Uint8,
    Version,
    WeightManifest,
)
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore
from meshrl.weights.carrier import RunPaths
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.messages import digest
from meshrl.weights.servicer import WeightsServicer
from meshrl.weights.transport import load_transport

RUN = "labels"
GROUP = 4
BATCH_GROUPS = 8
RESPONSE = 192
"""Tokens of a response: long enough for several versions."""
FIRST_TOKEN = 4
"""The lower ones are special tokens: one of them would end a response."""


def write_model(path: Path) -> dict[str, tuple[int, ...]]:
    """A tiny untied checkpoint with a tokenizer; the shapes of its parameters."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from meshrl.cli.demo.tiny_model import write_tiny_model

    write_tiny_model(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def said_by(version: Version, vocabulary: int) -> int:
    """The token that the weights of `version` sample for every prompt."""
    return FIRST_TOKEN + version.step % (vocabulary - FIRST_TOKEN)


class Saying:
    """A WeightSource whose model says `said_by(version)`: layers add nothing, the last norm sees ones."""

    def __init__(self, version: Version, shapes: dict[str, tuple[int, ...]]) -> None:
        # With it comes torch, which whoever only reads the command line can do without.
        from meshrl.trainer.model.snapshot import layout

        specs = layout(list(shapes.items()), dtype="float32", itemsize=4, bucket_bytes=1 << 30)
        self._bucket = np.zeros(sum(spec.nbytes for spec in specs), np.uint8)
        for spec in specs:
            place = self._bucket[spec.offset : spec.offset + spec.nbytes]
            weight = place.view(np.float32).reshape(spec.shape)
            if spec.name in ("model.embed_tokens.weight", "model.norm.weight"):
                weight[:] = 1
            elif spec.name == "lm_head.weight":
                weight[said_by(version, spec.shape[0])] = 2
        self._bucket.flags.writeable = False
        self.manifest = WeightManifest(
            run=RUN,
            version=version,
            tensors=tuple(specs),
            bucket_bytes=(self._bucket.nbytes,),
            bucket_hashes=(digest(self._bucket),),
        )

    def bucket(self, index: int) -> Uint8:
        return self._bucket


def recipe_of(folder: Path, carrier: str) -> Path:
    recipe = {
        "run": {"name": RUN, "dir": str(folder / "run")},
        "model": {"path": str(folder / "model")},
        "data": {
            "train_batch_size": BATCH_GROUPS,
            "max_prompt_length": 8,
            "max_response_length": RESPONSE,
        },
        "rollout": {
            "name": "torch",
            "n": GROUP,
            "slots": 2 * GROUP,
            "on_update": "in_flight",
            "journal_tokens": 32,
            "engine": {"device": "cpu"},
        },
        "reward": {"mixed_versions": "allow"},
        "queue": {"max_staleness": "inf", "lease_ttl_s": 3.0, "max_attempts": 100},
        "weights": {"carrier": carrier, "base_s": 5.0, "silence_s": 10.0},
    }
    path = folder / "labels.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@dataclass
class Labels:
    """One campaign."""

    folder: Path
    tokens: int
    kills: int
    seed: int
    workers: int = 2
    carrier: str = "shm"
    update_s: float = 0.3
    found: Counter[str] = field(default_factory=Counter)
    """tokens, mislabelled, responses, mixed (of several versions), batches."""
    updates: int = 0
    killed: int = 0
    vocabulary: int = 0

    def __post_init__(self) -> None:
        self._trained = asyncio.Event()
        self._ended = asyncio.Event()
        """A process ended without being killed by this test."""
        self._watching: list[asyncio.Task[None]] = []

    async def run(self) -> dict[str, object]:
        """Wait for enough tokens and enough killed processes."""
        shapes = await asyncio.to_thread(write_model, self.folder / "model")
        self.vocabulary = shapes["lm_head.weight"][0]
        self.recipe = recipe_of(self.folder, self.carrier)
        loaded = load_recipe(self.recipe, (), sections=("model", "rollout", "weights"))
        loaded.run.path.mkdir(parents=True, exist_ok=True)
        self.queue = await TransferQueue.open(MemoryStore())
        await self.queue.open_run(train_spec(loaded))
        self.epoch = (await self.queue.acquire(RUN, "labels")).epoch
        weights_coordinator = WeightCoordinator(
            loaded.weights,
            run=RUN,
            epoch=self.epoch,
            transport=load_transport(
                loaded.weights, RunPaths(directory=loaded.run.path, model_path=loaded.model.path)
            ),
            on_committed=lambda version: self.queue.publish(RUN, version),
        )
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.queue.close)
            servicers = [QueueServicer(self.queue), WeightsServicer(weights_coordinator)]
            server = await stack.enter_async_context(
                GrpcServer(ServerSettings(drain_grace_s=1), servicers)
            )
            await stack.enter_async_context(weights_coordinator)
            await server.ready()
            self.address = server.address
            self._processes: list[asyncio.subprocess.Process] = []
            stack.push_async_callback(self._end)
            for number in range(self.workers):
                self._processes.append(await self._start(number))
            judge = StageWorker(
                self.queue,
                [RUN],
                train_spec(loaded).stages[1],
                _judge,
                worker="judge",
                intake=Intake(limit=256, per_call=64),
            )
            tasks = [
                asyncio.create_task(work)
                for work in (
                    self._feed(),
                    self._update(weights_coordinator, shapes),
                    judge.run(),
                    self._kill(),
                    self._ended.wait(),
                )
            ]
            training = asyncio.create_task(self._train())
            try:
                await asyncio.wait([*tasks, training], return_when=asyncio.FIRST_COMPLETED)
                for task in (*tasks, training):
                    if task.done():
                        task.result()
                # If every process were killed, there would be nothing to wait for.
                assert not self._ended.is_set(), self._logs()
                await training
            finally:
                for task in (*tasks, training):
                    task.cancel()
                await asyncio.gather(*tasks, training, return_exceptions=True)
        seconds = time.monotonic() - began
        return {
            "benchmark": "labels",
            "seed": self.seed,
            "carrier": self.carrier,
            **self.found,
            "mislabelled": self.found["mislabelled"],
            "updates": self.updates,
            "kills": self.killed,
            "seconds": round(seconds, 1),
        }

    async def _start(self, number: int) -> asyncio.subprocess.Process:
        command = ["-m", "meshrl.cli", "serve", "rollout", str(self.recipe)]
        where = ["--queue", self.address, "--trainer", self.address, "--name", f"rollout-{number}"]
        with (self.folder / f"rollout-{number}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                *where,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._watching.append(asyncio.create_task(self._watch(process)))
        return process

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        if await process.wait() != -signal.SIGKILL:
            self._ended.set()

    def _logs(self) -> str:
        """How the last lines of each process read."""
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("rollout-*.log"))

    async def _end(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await asyncio.gather(*self._watching)

    async def _feed(self) -> None:
        """Prompts without end."""
        draw = np.random.default_rng(self.seed)
        sampling = SamplingParams(temperature=1.0, max_tokens=RESPONSE)
        number = 0
        while True:
            prompts = draw.integers(FIRST_TOKEN, self.vocabulary, (BATCH_GROUPS, 8), np.int32)
            tasks = [
                Task(
                    run=RUN,
                    task_id=str(number + index),
                    prompt_ids=prompt,
                    group_size=GROUP,
                    sampling=sampling,
                )
                for index, prompt in enumerate(prompts)
            ]
            while tasks:
                admitted = await self.queue.admit(RUN, tasks, cursor=str(number), wait_s=3600.0)
                number += admitted
                del tasks[:admitted]

    async def _update(
        self, weights_coordinator: WeightCoordinator, shapes: dict[str, tuple[int, ...]]
    ) -> None:
        while True:
            await weights_coordinator.publish(Saying(Version(self.epoch, self.updates), shapes))
            self.updates += 1
            await asyncio.sleep(self.update_s)

    async def _kill(self) -> None:
        """One process after the other, spread over the tokens that are still to come."""
        draw = random.Random(self.seed)
        for kill in range(self.kills):
            while self.found["tokens"] < self.tokens * (kill + 0.5) / self.kills:
                await self._trained.wait()
                self._trained.clear()
            number = draw.randrange(self.workers)
            process = self._processes[number]
            process.send_signal(signal.SIGKILL)
            await process.wait()
            self.killed += 1
            self._processes[number] = await self._start(number)
        await asyncio.Event().wait()

    async def _train(self) -> None:
        """Take, compare, settle, commit."""
        step = 0
        while self.found["tokens"] < self.tokens or self.killed < self.kills:
            batch = await self.queue.take(
                RUN,
                epoch=self.epoch,
                step=step,
                groups=BATCH_GROUPS,
                batch_id=str(step),
                wait_s=600.0,
            )
            uids = [row.uid for row in batch.rows]
            columns = await self.queue.fetch_rows(RUN, uids, ROLLOUT_COLUMNS)
            for uid, found in zip(uids, columns, strict=True):
                self._compare(rows.trajectory(uid, found))
            await self.queue.settle(RUN, epoch=self.epoch, step=step, batch_id=str(step))
            step += 1
            await self.queue.commit(RUN, epoch=self.epoch, step=step)
            self.found["batches"] += 1
            self._trained.set()
            self._report()

    def _compare(self, row: Trajectory) -> None:
        """Every sampled token has exactly one label, and is what those weights say, with probability one."""
        said = np.full(len(row.tokens), -1, np.int32)
        for span in row.spans:
            said[span.start : span.end] = said_by(span.version, self.vocabulary)
        sampled = row.loss_mask.astype(bool)
        wrong = (row.tokens != said)[sampled] | (np.abs(row.rollout_logprobs[sampled]) > 1e-3)
        self.found["tokens"] += int(sampled.sum())
        self.found["mislabelled"] += int(wrong.sum()) + int((said[~sampled] != -1).sum())
        self.found["responses"] += 1
        self.found["mixed"] += len(row.spans) > 1

    def _report(self) -> None:
        if sys.stderr.isatty() or self.found["batches"] % 10 == 0:
            line = f"{self.found['tokens']:,} of {self.tokens:,} tokens, {self.updates} updates,"
            print(
                f"{line} {self.killed} kills, {self.found['mislabelled']} mislabelled",
                file=sys.stderr,
            )


async def _judge(leased: Sequence[LeasedRow]) -> Sequence[StageResult]:
    return [
        rows.reward_write(
            Score(uid=row.uid, outcome=Outcome.OK, score=1.0, components={}, reward_hash="labels")
        )
        for row in leased
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--carrier", default="shm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshrl-labels-") as folder:
        report = asyncio.run(Labels(Path(folder), **vars(options)).run())
    print(json.dumps(report))
    return 1 if report["mislabelled"] else 0


if __name__ == "__main__":
    sys.exit(main())

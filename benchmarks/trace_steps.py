"""The cost of tracing for a row, by pairs of steps: one traced, one not, hundreds of times in one process.

    python benchmarks/trace_steps.py [--pairs 500] [--shares 0.1,1] [--tokens 32,256] [--pool FILE]

The parts of every service (feeder, queue, rollout worker with the embedded engine, reward, reference, trainer) run
in one process with one thread, as in `learning.py`, and reach the queue by gRPC over loopback. Training is on
policy, by a learning rate that changes nothing, on rows of one length: every step has the same work, its own
sampling included. Steps are traced or not in turn (ABBA), so what else the machine does disturbs both alike. Spans
are on disk before a traced step counts as ended, and the queue's server looks at the metadata of calls in traced
steps alone.

Tracing does the same for a row of one turn whatever its model and its length are. So its cost in microseconds is
taken from the pairs of a model that computes next to nothing (one layer of 16, 4 tokens), where a row is cheap and
the difference plain; and then compared with untraced rows of the demo's model at each of `--tokens`, measured after
it in the same process. Counted is the processor time of the whole process. The last line is JSON: for each share
the cost of a row, traced or not (with 0.1 nine of ten groups are not), as the mean over the pairs without the most
disturbed tenth at either end, with the interval that holds 95 % of 2,000 resamples of the pairs; and that interval
in percent of a row of each length. Share 0, pairs in which nothing is traced, shows what the method says of
nothing. Not in it: one span per replica and step, of the weight plane; and that spans between the work of a large
model find a colder cache (`trace_cost.py` measures them there).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from startup import HERE, RECIPE, assets
from transformers import AutoConfig, AutoModelForCausalLM

# isort: split
sys.path.append(str(HERE))
from learning import train

from meshrl.common import tracing
from meshrl.config.loading import load_recipe
from meshrl.contract.types import Json
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.trainer.metrics.log import MetricsLog
from meshrl.trainer.ranks.world import World
from meshrl.transferqueue.queue import TransferQueue

ROWS, GROUP = 32, 8
"""Rows of a step, and of a group."""
WARM, ROW_PAIRS = 8, 4
"""Steps before the first pair; pairs by which a row of another length is measured."""
LEAST = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "intermediate_size": 16,
    "head_dim": 8,
}
LEAST_TOKENS = 4
CUT = 0.1
ORDER = (True, False, False, True)


class Clients:
    """The queue by a server that knows of traces, in traced steps, and by one that does not."""

    def __init__(self, plain: QueueClient, traced: QueueClient) -> None:
        self._plain, self._traced = plain, traced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._traced if tracing.is_on() else self._plain, name)


class TracedSteps(MetricsLog):
    """Switches tracing at the end of a step, and keeps the processor time that each step took."""

    def __init__(self, path: Path, share: float) -> None:
        super().__init__(path)
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._step = 0
        self._tracer = (
            tracing.Tracer(path.with_name("spans.jsonl"), "all", share) if share else None
        )
        self._began = time.process_time()

    def write(self, step: int, metrics: Mapping[str, Json]) -> None:
        """A step has ended."""
        traced = ORDER[self._step % len(ORDER)]
        if traced and self._tracer:
            self._tracer._save(tracing._emptied(self._tracer._lines))
        if self._step >= WARM:
            self.seconds[traced].append(time.process_time() - self._began)
        super().write(step, metrics)
        self._step += 1
        tracing._tracer = self._tracer if ORDER[self._step % len(ORDER)] else None
        self._began = time.process_time()


@asynccontextmanager
async def by_grpc(queue: TransferQueue) -> AsyncIterator[Clients]:
    """Two servers of the queue in this process: whether one looks for traces is decided when it starts."""
    settings = ServerSettings(metrics_port=None, drain_grace_s=1)
    async with GrpcServer(settings, [QueueServicer(queue)]) as plain:
        tracing._tracer = tracing.Tracer(Path("unused"), "none", 1.0)
        async with GrpcServer(settings, [QueueServicer(queue)]) as traced:
            tracing.stop()
            async with QueueClient(plain.address) as one, QueueClient(traced.address) as other:
                yield Clients(one, other)


def measure(
    world: World, tokens: int, share: float, pairs: int, shape: Mapping[str, Any] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of processor time a row, of so many traced steps and of as many untraced ones."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        changes = assets(folder)[:-1]
        write_endless(folder / "model", shape or {})
        recipe = load_recipe(
            RECIPE,
            [
                *changes,
                "trainer.total_epochs=100000",
                f"trainer.total_training_steps={WARM + 2 * pairs}",
                "actor.optim.lr=1e-12",
                "queue.max_staleness=0",
                "reward.mixed_versions=allow",
                f"data.max_response_length={tokens}",
                f"data.train_batch_size={ROWS // GROUP}",
                "trainer.save_freq=100000",
                "trainer.test_freq=-1",
            ],
        )
        kept: list[TracedSteps] = []

        def metrics(path: Path) -> MetricsLog:
            kept.append(TracedSteps(path, share))
            return kept[0]

        asyncio.run(train(recipe, world, folder, reached=by_grpc, metrics=metrics))
        tracing.stop()
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
            assert line["batch/rows"] == ROWS
            assert line["response/length_mean"] == tokens
    on, off = (np.array(kept[0].seconds[traced]) / ROWS * 1e6 for traced in (True, False))
    return on, off


def write_endless(model: Path, shape: Mapping[str, Any]) -> None:
    """Change the model such that no token ends a response, and to `shape`."""
    config = AutoConfig.from_pretrained(model, **shape)
    config.eos_token_id = None
    AutoModelForCausalLM.from_config(config).save_pretrained(model)


def interval(values: np.ndarray) -> dict[str, float]:
    """The mean without the outermost tenths, and what holds 95 % of its resamples."""
    draws = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    low, high = np.percentile(trimmed(values[draws]), (2.5, 97.5))
    return {"mean": float(trimmed(values[None])[0]), "from": float(low), "to": float(high)}


def trimmed(values: np.ndarray) -> np.ndarray:
    """Means of rows, without a tenth at either end."""
    ordered, cut = np.sort(values, axis=1), int(values.shape[1] * CUT)
    return ordered[:, cut : values.shape[1] - cut].mean(axis=1)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=500, help="of steps, for each share")
    parser.add_argument("--shares", default="0.1,1", help="of traced groups")
    parser.add_argument("--tokens", default="32,256", help="of the responses to compare with")
    parser.add_argument("--pool", type=Path, help="a file that keeps what several runs measured")
    given = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    world = World.start("cpu")
    measured: list[dict[str, Any]] = []
    for share in filter(None, given.shares.split(",")):
        on, off = measure(world, LEAST_TOKENS, float(share), given.pairs, LEAST)
        measured.append({"share": share, "us": (on - off).tolist()})
    for tokens in filter(None, given.tokens.split(",")):
        _, off = measure(world, int(tokens), 0.0, ROW_PAIRS)
        measured.append({"tokens": tokens, "us": off.tolist()})
    world.close()
    if given.pool:
        with given.pool.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in measured)
        measured = [json.loads(line) for line in given.pool.read_text().splitlines()]
    costs = pooled(measured, "share")
    rows = {tokens: float(np.median(us)) for tokens, us in pooled(measured, "tokens").items()}
    result = {
        "benchmark": "trace_steps",
        "pairs": {share: len(us) for share, us in costs.items()},
        "us": {share: rounded(interval(us), 1) for share, us in costs.items()},
        "row_us": {tokens: round(us) for tokens, us in rows.items()},
        "percent": {
            tokens: {share: rounded(interval(100 * us / row), 3) for share, us in costs.items()}
            for tokens, row in rows.items()
        },
    }
    print(json.dumps(result))


def pooled(measured: Sequence[Mapping[str, Any]], kind: str) -> dict[str, np.ndarray]:
    """The measurements of each share, or each length, in all runs."""
    names = dict.fromkeys(each[kind] for each in measured if kind in each)
    return {
        name: np.concatenate([each["us"] for each in measured if each.get(kind) == name])
        for name in names
    }


def rounded(values: Mapping[str, float], digits: int) -> dict[str, float]:
    """For people."""
    return {name: round(value, digits) for name, value in values.items()}


if __name__ == "__main__":
    main()

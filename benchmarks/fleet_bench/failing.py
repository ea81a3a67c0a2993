"""One replica of four answers every request with an error after 1 ms: how many prompts does it get?

Ours: workers lease by free capacity, each behind its circuit breaker. The replica answers its first requests: a
worker whose engine never did ends after three failed probes. Beside it a router that sends each prompt to the replica
with the fewest requests in flight, over the same engines, with as many prompts in flight as there are healthy slots;
one that failed is routed again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import numpy as np
from fleet_bench.parts import (
    FIRST,
    GROUP,
    RUN,
    Replica,
    engine,
    feeding,
    open_queue,
    serve_version,
    task,
)

from meshrl.contract.errors import MeshError
from meshrl.contract.types import GenerateRequest, SamplingParams
from meshrl.testing.engines.echo import Behaviour, EchoEngine

HEALTHY, SLOTS = 3, 16
TOKENS, TOKENS_PER_S = 60, 200.0
SETTLING_S = 2.0
NAMES = [*(f"healthy-{number}" for number in range(HEALTHY)), "broken"]


def make_engines() -> dict[str, EchoEngine]:
    """Three that take 0.3 s for a response, and one that takes 1 ms for an error once it fails on request."""
    made = {name: engine(slots=SLOTS, tokens_per_s=TOKENS_PER_S) for name in NAMES[:-1]}
    made["broken"] = engine(slots=SLOTS, tokens_per_s=16_000)
    return made


async def ours(seconds: float) -> dict[str, Any]:
    """Prompts that each worker began from SETTLING_S after the failures on, and rows that cost an attempt."""
    # 6,144 rows: none is trained meanwhile.
    async with (
        open_queue(batch_groups=64, max_staleness=11) as queue,
        feeding(queue, lambda number: task(number, max_tokens=TOKENS)),
    ):
        while sum((await queue.ledger(RUN)).resident.values()) < 64 * 12 * GROUP:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        replicas = {
            name: Replica(queue, name, made, SLOTS) for name, made in make_engines().items()
        }
        for replica in replicas.values():
            await replica.start(FIRST)
        while not replicas["broken"].worker.stats.written:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        replicas["broken"].engine.behave(Behaviour.FAIL)
        await asyncio.sleep(SETTLING_S)
        before = {name: replica.worker.stats.leased for name, replica in replicas.items()}
        written = sum(replica.worker.stats.written for replica in replicas.values())
        await asyncio.sleep(seconds)
        got = {n: r.worker.stats.leased - before[n] for n, r in replicas.items()}
        done = sum(replica.worker.stats.written for replica in replicas.values()) - written
        broken = replicas["broken"].worker.report()
        measured = shares(got, before, done, seconds) | {
            "dead_lettered": sum((await queue.ledger(RUN)).dead_lettered.values()),
            "attempts_counted": broken.rows.failed,
            "given_back_uncounted": broken.rows.returned,
            "breaker": str(broken.breaker),
        }
        replicas["broken"].engine.behave(Behaviour.ANSWER)
        for replica in replicas.values():
            await replica.leave()
    return measured


async def least_in_flight(seconds: float) -> dict[str, Any]:
    """The same engines behind a router that picks the replica with the fewest requests in flight."""
    engines = make_engines()
    engines["broken"].behave(Behaviour.FAIL)
    for made in engines.values():
        await made.start()
        await serve_version(made, FIRST)
    in_flight: Counter[str] = Counter(dict.fromkeys(engines, 0))
    got: Counter[str] = Counter(dict.fromkeys(engines, 0))
    done = 0
    numbers = itertools.count()

    async def client() -> None:
        nonlocal done
        while True:
            name = min(engines, key=lambda each: in_flight[each])
            in_flight[name] += 1
            got[name] += 1
            request = GenerateRequest(
                request_id=str(next(numbers)),
                prompt_ids=np.arange(8, dtype=np.int32),
                sampling=SamplingParams(max_tokens=TOKENS),
            )
            try:
                async for _ in engines[name].generate(request):
                    pass
                done += 1
            except MeshError:
                pass  # routed again, by the same rule
            finally:
                in_flight[name] -= 1

    clients = [asyncio.create_task(client()) for _ in range(HEALTHY * SLOTS)]
    await asyncio.sleep(SETTLING_S)
    before, at_start = Counter(got), done
    await asyncio.sleep(seconds)
    measured = shares(
        {name: got[name] - before[name] for name in engines}, before, done - at_start, seconds
    )
    for each in clients:
        each.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    for made in engines.values():
        await made.close()
    return measured


def shares(
    got: dict[str, int], before: dict[str, int] | Counter[str], done: int, seconds: float
) -> dict[str, Any]:
    """The figures of one side."""
    return {
        "broken_share": got["broken"] / max(1, sum(got.values())),
        "broken_prompts": got["broken"],
        "broken_prompts_while_settling": before["broken"],
        "finished_per_s": done / seconds,
        "possible_per_s": HEALTHY * SLOTS * TOKENS_PER_S / TOKENS,
    }


async def measure(seconds: float) -> dict[str, Any]:
    """Both, one after the other."""
    return {"ours": await ours(seconds), "least_in_flight": await least_in_flight(seconds)}

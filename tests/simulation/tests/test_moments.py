"""Two things in one moment, and messages in a wrong order: small parts of the product in virtual time."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import ConfigError, UnavailableError, WaitTimeoutError
from meshrl.contract.types import ROLLOUT_STAGE, Version
from meshrl.http.gateway.sessions import SessionTable
from meshrl.rollout.agents.session import AgentSession
from meshrl.rpc.interceptors import Context
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue.model.waiting import CLAIM_S
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import RunPaths
from meshrl.weights.messages import manifest_to_message, stamp
from meshrl.weights.replica_controller import ReplicaController, ServedEngine
from meshrl.weights.servicer import WeightsServicer
from meshrl.weights.shared_memory import boot_id
from meshrl.weights.transport import load_transport
from tests.doubles.weights import HashSink, StubSource
from tests.simulation.call import connect
from tests.simulation.network import Delays, Network
from tests.simulation.virtual_loop import START_S

from ..virtual_time import run, virtual_time


@pytest.mark.parametrize("seed", range(50))
def test_a_session_that_comes_in_the_moment_of_a_deadline_reaches_somebody(seed: int) -> None:
    draw = random.Random(seed)

    async def claims_and_sessions() -> tuple[list[Any], list[Any]]:
        table = SessionTable(prompt_tokens=None)
        given: list[Any] = []
        claimed: list[Any] = []

        async def claim() -> None:
            await asyncio.sleep(draw.randrange(4))
            try:
                claimed.append(await table.claim(draw.randrange(1, 4)))
            except WaitTimeoutError:
                return

        async def give() -> None:
            await asyncio.sleep(draw.randrange(1, 7))
            session = cast(AgentSession, SimpleNamespace(finished=asyncio.Event()))
            if table.hand_over(session, cast(Any, None)):
                given.append(session)

        await asyncio.gather(claim(), claim(), give(), give())
        return given, claimed

    given, claimed = run(seed, claims_and_sessions())
    assert [session for session in given if session not in claimed] == []


class Hasty(WeightsServicer):
    """A coordinator whose first message is a beat."""

    def __init__(self) -> None:
        self.silence_s = 10.0
        self.joins = 0
        self.messages = 0

    async def Join(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ReplicaMessage], context: Context
    ) -> None:
        self.joins += 1
        await context.write(pb.PlaneMessage(beat=pb.Beat()))
        async for _ in request_iterator:
            self.messages += 1


def replica_of_trainer(network: Network) -> ReplicaController:
    """Joins over shared memory whoever listens at trainer:1."""
    config = WeightsConfig(carrier="shm")
    return ReplicaController(
        config,
        run="run",
        replica="rollout-0",
        engine=ServedEngine(HashSink(), config),
        transport=load_transport(config, RunPaths(directory=Path("simulated"))),
        connect=lambda: connect(network, "trainer:1"),
    )


def test_a_first_message_that_is_no_welcome_is_refused_and_the_joining_tried_again() -> None:
    with virtual_time(0) as loop:
        network = Network(loop, 0, Delays())
        hasty = Hasty()
        network.listen("trainer:1", [hasty])
        controller = replica_of_trainer(network)

        async def a_minute() -> None:
            joining = asyncio.create_task(controller.run())
            await asyncio.sleep(60)
            joining.cancel()

        loop.run_until_complete(loop.create_task(a_minute()))
        assert loop.time() - START_S >= 60
        assert 2 < hasty.joins < 200  # again and again, with pauses
        assert hasty.messages <= hasty.joins  # a HELLO each, and no beat


class Proposing(WeightsServicer):
    """A coordinator that proposes a version over shared memory which nobody can open here."""

    def __init__(self, ending: str) -> None:
        self.silence_s = 10.0
        self.joins = 0
        self._ending = ending

    async def Join(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ReplicaMessage], context: Context
    ) -> None:
        self.joins += 1
        about = stamp("run", self.joins, Version(1, 0))
        await context.write(pb.PlaneMessage(stamp=about, welcome=pb.PlaneWelcome(beat_s=1.0)))
        gone = {"boot": boot_id(), "probe": "meshrl-0123456789abcdef.arena", "nonce": "0" * 16}
        propose = pb.PlanePropose(
            manifest=manifest_to_message(StubSource("run", Version(1, 0)).manifest),
            endpoint=json.dumps(gone),
            carrier="shm",
        )
        await context.write(pb.PlaneMessage(stamp=about, propose=propose))
        async for message in request_iterator:
            if message.WhichOneof("body") == "failed":
                break
        if self._ending == "is silent":
            await asyncio.sleep(60)
        elif self._ending == "answers":
            abort = pb.PlaneAbort(code="config", message="it failed", final=True)
            await context.write(pb.PlaneMessage(stamp=about, abort=abort))


@pytest.mark.parametrize("ending", ["answers", "dies", "is silent"])
def test_only_a_trainer_that_answers_ends_a_replica_which_cannot_open_its_shared_memory(
    ending: str,
) -> None:
    with virtual_time(0) as loop:
        network = Network(loop, 0, Delays())
        trainer = Proposing(ending)
        network.listen("trainer:1", [trainer])
        controller = replica_of_trainer(network)

        async def a_minute() -> None:
            async with asyncio.timeout(60):
                await controller.run()

        task = loop.create_task(a_minute())
        if ending == "answers":
            with pytest.raises(ConfigError, match="another container or another user"):
                loop.run_until_complete(task)
            assert trainer.joins == 1
        else:
            with pytest.raises(TimeoutError):
                loop.run_until_complete(task)
            assert trainer.joins > 1


@pytest.mark.parametrize(("after_s", "given"), [(0.9 * CLAIM_S, ("t1", 0)), (CLAIM_S, ("t0", 1))])
def test_a_claim_to_siblings_ends_by_itself_and_order_is_as_before(
    after_s: float, given: tuple[str, int]
) -> None:
    async def second_lease() -> tuple[str, int]:
        queue = await TransferQueue.open(MemoryStore())
        actors = Actors(queue)
        await actors.start(spec(batch_groups=64, stages=(ROLLOUT_STAGE,), group_size=4))
        await actors.feed(tasks(2, group_size=4))
        await actors.lease(limit=1, worker="a")
        await asyncio.sleep(after_s)
        (row,) = (await actors.lease(limit=1, worker="b")).rows
        await queue.close()
        return row.uid.task, row.uid.index

    assert run(0, second_lease()) == given


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (UnavailableError("UNAVAILABLE: /meshrl.v1.Weights/Join: the service is draining"), False),
        (UnavailableError("UNAVAILABLE: connection refused"), True),
    ],
)
def test_a_trainer_that_ends_is_no_fault_of_a_worker_s_connection(
    fault: UnavailableError, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with virtual_time(0) as loop:
        controller = replica_of_trainer(Network(loop, 0, Delays()))
        caplog.set_level(logging.INFO)
        controller._report(fault)
    assert ("is not connected to the trainer" in caplog.text) is told

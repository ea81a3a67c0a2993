"""`why_waiting` names within a minute the service of a mesh that hangs for ever, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

import pytest

from meshrl.contract.types import Waiting
from tests.simulation.faults import Fault, Kind
from tests.simulation.mesh import Mesh
from tests.simulation.shape import RUN, Shape

FOR_EVER_S = 1e6


@pytest.fixture(autouse=True)
def _without_logs() -> Iterator[None]:
    """Silence the logs of services while the mesh ends without them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Watched(Mesh):
    """A mesh that is asked once, a minute after its start, and then ended."""

    asked: Sequence[Waiting] = ()

    async def _check_often(self) -> None:
        await asyncio.sleep(60)
        queue = self._services.queue
        assert queue is not None
        self.asked = await queue.why_waiting(RUN)
        self._services.done.set()


def silent(service: str) -> list[Fault]:
    return [Fault(at_s=3.0, kind=Kind.CUT, target=service, seconds=FOR_EVER_S)]


@pytest.mark.parametrize(
    ("shape", "faults", "said"),
    [
        (Shape(workers=1, reward_s=FOR_EVER_S), [], "stage reward by reward-0"),
        (Shape(slow_prompt_s=FOR_EVER_S), [], "stage rollout by rollout-"),
        (Shape(workers=1), silent("rollout-0"), "stage rollout, its lease by rollout-0 expired"),
        (Shape(workers=1), silent("reward-0"), "stage reward, its lease by reward-0 expired"),
        (Shape(prompts=64), silent("feeder"), "feeder"),
        (Shape(prompts=64, train_s=FOR_EVER_S), [], "trainer 1"),
    ],
    ids=["judge", "engine", "rollout", "reward", "feeder", "trainer"],
)
def test_a_planted_hang_is_located_within_a_minute(
    shape: Shape, faults: Sequence[Fault], said: str
) -> None:
    mesh = Watched(1, shape, faults)
    mesh.run()
    named = [f"{wait.what} {' '.join(wait.owners)}" for wait in mesh.asked]
    assert any(said in one for one in named), named

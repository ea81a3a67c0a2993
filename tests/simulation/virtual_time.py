"""Small parts of the product on the simulation's event loop: time is virtual, the order is the seed's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulation.loop import SimulatedLoop
from tests.simulation.virtual_loop import quiet


@contextmanager
def virtual_time(seed: int) -> Iterator[SimulatedLoop]:
    with quiet():
        loop = SimulatedLoop(seed)
        asyncio.set_event_loop(loop)
        try:
            yield loop
        finally:
            loop.close()
            asyncio.set_event_loop(None)


def run(seed: int, main: Coroutine[Any, Any, Any]) -> Any:
    with virtual_time(seed) as loop:
        return loop.run_until_complete(loop.create_task(main))


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a simulated loop."""

    @functools.wraps(test)
    def runs(*args: Any, **fixtures: Any) -> None:
        run(0, test(*args, **fixtures))

    return runs

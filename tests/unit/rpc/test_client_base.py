"""The deadline of a streamed answer is per message; the whole stream may take longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from meshrl.rpc.clients import base

SILENCE_S = 30.0


class Clock:
    """The event loop's clock, which can be moved ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        time = loop.time
        self.ahead_s = 0.0
        monkeypatch.setattr(loop, "time", lambda: time() + self.ahead_s)

    async def pass_by(self, seconds: float) -> None:
        self.ahead_s += seconds
        for _ in range(3):  # the loop looks at its timers
            await asyncio.sleep(0)


class Answers:
    """A call that answers with numbers, each after its pause."""

    def __init__(self, clock: Clock, pauses: list[float]) -> None:
        self.cancelled = False
        self._clock = clock
        self._pauses = pauses

    async def __aiter__(self) -> AsyncIterator[int]:
        for number, seconds in enumerate(self._pauses):
            await self._clock.pass_by(seconds)
            yield number

    def cancel(self) -> None:
        self.cancelled = True


async def test_a_stream_may_take_long_if_each_message_is_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = [0.8 * SILENCE_S] * 5
    call = Answers(Clock(monkeypatch), pauses)
    assert await base._collect(lambda: call, SILENCE_S) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("before", [0, 1, 4])
async def test_a_late_message_ends_the_wait_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    pauses = [0.8 * SILENCE_S] * before + [1.2 * SILENCE_S]
    call = Answers(Clock(monkeypatch), pauses)
    with pytest.raises(TimeoutError):
        await base._collect(lambda: call, SILENCE_S)
    assert call.cancelled

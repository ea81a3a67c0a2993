"""A simulated network: who listens where, how long messages take, and what is wrong with whose links now.

`channel.py` has the client's end of a connection, `call.py` an RPC and what can go wrong with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

import grpc

from meshrl.rpc.interceptors import InterceptedHandlers, as_status
from meshrl.rpc.runtime import Servicer
from tests.simulation.loop import PROCESS, Process, SimulatedLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """How long messages take, in seconds."""

    mean_s: float = 0.002
    slow_share: float = 0.02
    """Share of messages that take longer."""
    slow_mean_s: float = 0.2


@dataclass(slots=True)
class Weather:
    """Faults of one process's network, each until a moment of the virtual clock."""

    cut_until: float = 0.0
    """Nothing gets in or out."""
    break_requests_until: float = 0.0
    """Calls break before their request arrives."""
    break_answers_until: float = 0.0
    """Calls break after they were worked on."""
    late_requests_until: float = 0.0
    """Calls break at once for the caller, and arrive seconds later."""
    slow_until: float = 0.0
    """Every message takes SLOWER times as long."""


SLOWER: Final = 50.0
STRAY_SHARE: Final = 0.3
"""Share of calls that reach an older process behind an address, while it lives."""
LATEST_S: Final = 8.0
"""The longest delay of a request that its caller gave up."""


class OpenCall(Protocol):
    """An open call as the network sees it."""

    method: str

    def involves(self, name: str) -> bool:
        """True if one of its ends is the process `name`."""

    def watch_silence(self) -> None:
        """A silence began: break the call at both ends if it outlasts the keepalive."""

    def reset(self) -> None:
        """Break the call at both ends; each hears of it by itself."""

    def end_draining(self) -> None:
        """The server ends, and this call only waits."""

    async def until_served(self) -> None:
        """Wait until the server is done with it."""


class Endpoint:
    """A listening process and its handlers."""

    def __init__(
        self, process: Process | None, handlers: InterceptedHandlers, waits: frozenset[str]
    ) -> None:
        self.process = process
        self.handlers = handlers
        self.waits = waits
        """Full names of the methods that may wait long."""
        self.stopped = False
        self.served: dict[OpenCall, None] = {}
        """The calls that its handlers work on, also those that their clients gave up in silence."""

    @property
    def alive(self) -> bool:
        """False after it stopped, or its process died."""
        return not self.stopped and (self.process is None or not self.process.dead)


class Network:
    """All links of one run."""

    def __init__(self, loop: SimulatedLoop, seed: int, delays: Delays) -> None:
        self._loop = loop
        self._delays = delays
        self._random = random.Random(f"network {seed}")
        self._endpoints: dict[str, list[Endpoint]] = {}
        """Endpoints by address, the newest last: a process that counts as dead keeps listening."""
        self._weather: dict[str, Weather] = {}
        self._hidden: dict[tuple[Process, str], float] = {}
        """The times until which a process is cut off from a name, or from all."""
        self._silent_until = 0.0
        """Everything passes from then on."""
        self._calls: dict[OpenCall, None] = {}
        self.made = 0
        """Calls so far."""

    def listen(self, address: str, servicers: Sequence[Servicer]) -> Endpoint:
        """Serve `servicers` in the process that runs, beside those that listen there and live."""
        handlers = InterceptedHandlers((as_status,))
        for servicer in servicers:
            servicer.attach(cast("grpc.aio.Server", handlers))
        waits = frozenset(f"/{each.service}/{name}" for each in servicers for name in each.waits)
        endpoint = Endpoint(PROCESS.get(), handlers, waits)
        self._endpoints[address] = [*self._living(address), endpoint]
        return endpoint

    async def stop(self, endpoint: Endpoint) -> None:
        """As a server drains: refuse new calls, end those that wait for something, let the others finish."""
        endpoint.stopped = True
        for call in list(endpoint.served):
            if call.method in endpoint.waits:
                call.end_draining()
        for call in list(endpoint.served):
            if self._loop.over:
                return  # it is thrown away, and waits for nothing
            await call.until_served()

    def weather(self, name: str) -> Weather:
        """The state of the links of the process `name`."""
        return self._weather.setdefault(name, Weather())

    def cut(self, name: str, seconds: float) -> None:
        """Silence the process `name`; calls that it has open break if the silence outlasts the keepalive."""
        weather = self.weather(name)
        weather.cut_until = max(weather.cut_until, self._loop.time() + seconds)
        self._silence(weather.cut_until, name)

    def hide(self, process: Process, seconds: float, *, others: str = "") -> None:
        """The same for one life of a process, not for its successors; with `others`, only towards that name."""
        self._hidden[process, others] = until = self._loop.time() + seconds
        self._silence(until, process.name, *filter(None, (others,)))

    def reset(self, name: str) -> None:
        """Break every open call of the process `name`, as a proxy between does that restarts."""
        for call in list(self._calls):
            if call.involves(name):
                call.reset()

    def _silence(self, until: float, *names: str) -> None:
        self._silent_until = max(self._silent_until, until)
        for call in list(self._calls):
            if all(call.involves(name) for name in names):
                call.watch_silence()

    def silent_until(self, *processes: Process | None) -> float:
        """The time until which `processes` are cut off from each other; in the past if they are not."""
        if self._silent_until <= self._loop.time():
            return 0.0
        known = [process for process in processes if process is not None]
        until = 0.0
        for process in known:
            if process.name in self._weather:
                until = max(until, self._weather[process.name].cut_until)
            for others in ("", *(each.name for each in known)):
                until = max(until, self._hidden.get((process, others), 0.0))
        return until

    def endpoint(self, address: str) -> Endpoint | None:
        """The listener at an address; of several, as behind a service's name, mostly the newest."""
        living = self._living(address)
        if len(living) > 1 and self._random.random() < STRAY_SHARE:
            return living[0]
        return living[-1] if living else None

    def _living(self, address: str) -> list[Endpoint]:
        return [endpoint for endpoint in self._endpoints.get(address, ()) if endpoint.alive]

    def delay(self, *processes: Process | None) -> float:
        """Delay of one message between `processes`, in seconds."""
        delays, draw = self._delays, self._random
        seconds = draw.expovariate(1 / delays.mean_s)
        if draw.random() < delays.slow_share:
            seconds += draw.expovariate(1 / delays.slow_mean_s)
        now = self._loop.time()
        for process in processes:
            weather = self._weather.get(process.name) if process is not None else None
            if weather is not None and weather.slow_until > now:
                seconds *= SLOWER
        return seconds

    def lateness(self) -> float:
        """Seconds by which a request that its caller gave up arrives late."""
        return self._random.uniform(0.0, LATEST_S)

    def opened(self, call: OpenCall) -> None:
        """Keep `call` until it is over."""
        self.made += 1
        self._calls[call] = None

    def over(self, call: OpenCall) -> None:
        """Forget `call`."""
        self._calls.pop(call, None)

    @property
    def open_calls(self) -> int:
        """Calls that are not over."""
        return len(self._calls)

    def loop(self) -> SimulatedLoop:
        """The run's loop."""
        return self._loop

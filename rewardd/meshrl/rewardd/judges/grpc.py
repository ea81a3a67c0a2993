"""A judge behind the mesh's own `Reward` service: another reward process, on another machine perhaps."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from meshrl.contract import config
from meshrl.contract.errors import MeshError
from meshrl.contract.ports import Judge
from meshrl.contract.types import Outcome, Sample, Score
from meshrl.rewardd.judges._retrying import Guard, GuardConfig

WIRE = "meshrl.rpc.clients.reward"
"""Its client. This room knows no gRPC, so it is found by name when a recipe asks for it."""


class Config(config.Config):
    """Where it listens."""

    address: str
    """`host:port`."""
    guard: GuardConfig = GuardConfig()
    """Deadline, retries, circuit breaker."""


class RemoteJudge:
    """The Judge port, guarded.."""

    def __init__(self, wire: Any, address: str, guard: GuardConfig) -> None:
        self._wire = wire
        self._judge: Judge = wire
        self._guard = Guard(f"the judge at {address}", guard)

    @property
    def reward_hash(self) -> str:
        """What scores there, asked at the start."""
        return self._judge.reward_hash

    async def start(self) -> None:
        """Ask what scores there. Raises UnavailableError, or TimeoutError after the guard's deadline."""
        await self._guard.ask(self._wire.open)

    async def close(self) -> None:
        """Hang up; idempotent."""
        await self._judge.close()

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One Score per sample, in order."""
        try:
            return await self._guard.ask(lambda: self._judge.score(samples))
        except TimeoutError:
            outcome, reason = (
                Outcome.TIMEOUT,
                "the judge elsewhere did not answer within its deadline",
            )
        except MeshError as error:
            outcome, reason = Outcome.INFRA_FAULT, str(error)
        return [Score(uid=s.uid, outcome=outcome, reason=reason) for s in samples]


def build(config: Config) -> RemoteJudge:
    """The judge, not connected yet."""
    wire = importlib.import_module(WIRE).JudgeClient(
        config.address, patience_s=0, deadline_s=config.guard.deadline_s
    )
    return RemoteJudge(wire, config.address, config.guard)

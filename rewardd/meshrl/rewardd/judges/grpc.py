"""A judge behind the mesh's own `Reward` service: another reward process, possibly on another machine."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from meshrl.common import config
from meshrl.contract.errors import MeshError
from meshrl.contract.ports import Judge
from meshrl.contract.types import Outcome, Sample, Score
from meshrl.rewardd.judges._remote import Retrier, RetryConfig

CLIENT = "meshrl.rpc.clients.services"
"""Module of its client, imported by name on demand, because this package imports no gRPC."""


class Config(config.Config):
    """Options of the kind `grpc`."""

    address: str
    """`host:port`."""
    guard: RetryConfig = RetryConfig()
    """Deadline, retries, circuit breaker."""


class GrpcJudge:
    """The Judge port, with deadline, retries and circuit breaker."""

    def __init__(self, client: Any, address: str, guard: RetryConfig) -> None:
        self._client = client
        self._judge: Judge = client
        self._retrier = Retrier(f"the judge at {address}", guard)

    @property
    def reward_hash(self) -> str:
        """The remote judge's hash, read at start."""
        return self._judge.reward_hash

    async def start(self) -> None:
        """Read the remote reward hash. Raises UnavailableError, or TimeoutError after `guard.deadline_s`."""
        await self._retrier.ask(self._client.open)

    async def close(self) -> None:
        """Close the connection; idempotent."""
        await self._judge.close()

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One Score per sample, in order."""
        lasting = False
        try:
            return await self._retrier.ask(lambda: self._judge.score(samples))
        except TimeoutError:
            outcome, reason = (
                Outcome.TIMEOUT,
                "the remote judge did not answer within its deadline",
            )
        except MeshError as error:
            outcome, reason, lasting = Outcome.INFRA_FAULT, str(error), not error.retryable
        return [Score(uid=s.uid, outcome=outcome, reason=reason, lasting=lasting) for s in samples]


def build(config: Config) -> GrpcJudge:
    """The judge, not connected yet."""
    client = importlib.import_module(CLIENT).JudgeClient(
        config.address, retry_s=0, deadline_s=config.guard.deadline_s
    )
    return GrpcJudge(client, config.address, config.guard)

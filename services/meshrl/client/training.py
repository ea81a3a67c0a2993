"""Models that a program of yours trains by requests: `async with TrainingClient.connect("host:port") as training`.

model = await training.create(CreateModel(base_model="Qwen/Qwen3-8B", lora_rank=32))
passed = await model.submit(Pass(examples=rows, loss="importance_sampling"))
await model.ask(AdamStep(learning_rate=1e-4))
logprobs = (await model.result(passed)).outputs
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from meshrl.common.sockets import check_address
from meshrl.contract import ports
from meshrl.contract.errors import InfraError, NotFoundError, UserError, WaitTimeoutError
from meshrl.contract.types import CreateModel, TrainingRequest, TrainingResult, TrainingVerb
from meshrl.rpc.clients.base import SERVICE_RETRY_S
from meshrl.rpc.clients.services import TrainingPortClient
from meshrl.rpc.credentials import Credential

ANSWER_WAIT_S: Final = 86_400.0
"""Default seconds that calls wait for an answer."""
PATIENCE_S: Final = SERVICE_RETRY_S
"""Seconds that a restart of the server may take before calls fail with UnavailableError."""


class TrainingClient:
    """A server that trains models for callers. What it has accepted survives its death, and is done once."""

    def __init__(self, address: str, patience_s: float, credential: Credential | None) -> None:
        self._address = check_address(address)
        self._retry_s = patience_s
        self._credential = credential
        self._port: TrainingPortClient | None = None

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        patience_s: float = PATIENCE_S,
        credential: str | Path | None = None,
    ) -> Self:
        """A server to enter with `async with`. Arguments and errors as of `Queue.connect`."""
        return cls(address, patience_s, Credential(credential) if credential else None)

    @property
    def port(self) -> ports.Training:
        """The port. Raises UserError when not connected."""
        if self._port is None:
            raise UserError("not connected: use it inside `with TrainingClient.connect(...)`")
        return self._port

    async def __aenter__(self) -> Self:
        if self._port is None:
            self._port = TrainingPortClient(
                self._address, retry_s=self._retry_s, credential=self._credential
            )
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Idempotent. Models stay."""
        port, self._port = self._port, None
        if port is not None:
            await port.close()

    async def create(self, verb: CreateModel, *, name: str = "") -> TrainedModel:
        """A new model, with a name of its own by default. Raises UserError, BusyError."""
        model = TrainedModel(self.port, name or uuid.uuid4().hex, 0)
        await model.ask(verb)
        return model

    def model(self, name: str, *, next_number: int) -> TrainedModel:
        """A model that another program has left, whose next request is `next_number`."""
        return TrainedModel(self.port, name, next_number)


class TrainedModel:
    """One model on the server. Its requests are done in the order in which they are submitted."""

    def __init__(self, port: ports.Training, name: str, next_number: int) -> None:
        self._port = port
        self._name = name
        self._next = next_number
        self._turn = asyncio.Lock()

    @property
    def name(self) -> str:
        """The model's name, as in the paths of its checkpoints."""
        return self._name

    @property
    def next_number(self) -> int:
        """The number of the next request: with it another program can continue."""
        return self._next

    async def submit(self, verb: TrainingVerb) -> int:
        """Have a request accepted, durably; returns its number. Raises UserError, BusyError, CapacityError."""
        async with self._turn:
            number = self._next
            request = TrainingRequest(model=self._name, number=number, verb=verb)
            try:
                await self._port.submit(request)
            except UserError:
                with suppress(NotFoundError, WaitTimeoutError):
                    await self._port.result(self._name, number, wait_s=0)
                    self._next += 1  # it was sent, and is used up
                raise
            self._next += 1
        return number

    async def result(self, number: int, *, wait_s: float = ANSWER_WAIT_S) -> TrainingResult:
        """The answer to a request, the same whenever it is asked for.

        Raises UserError or InfraError for a request that failed; WaitTimeoutError, NotFoundError.
        """
        answer = await self._port.result(self._name, number, wait_s=wait_s)
        if answer.error is not None:
            raise (UserError if answer.user_error else InfraError)(answer.error)
        return answer

    async def ask(self, verb: TrainingVerb, *, wait_s: float = ANSWER_WAIT_S) -> TrainingResult:
        """`submit` and `result`."""
        return await self.result(await self.submit(verb), wait_s=wait_s)

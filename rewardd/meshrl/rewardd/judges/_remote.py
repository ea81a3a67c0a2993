"""Base class of judges behind HTTP: one request per sample, several at once; outcomes; a hash.

A call has one deadline over all tries, retries with growing pauses, and a circuit breaker:

    closed ──`failures` in a row──▶ open ──after `cooldown_s`──▶ half open ──one success──▶ closed
                                     ▲                              └────────one failure──▶ open

While the circuit is open, calls fail at once with the failure that opened it. So nobody waits for a judge that is
down, and it is not flooded when it comes back. An error that a retry cannot repair (a wrong request) is not retried
and does not count.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshrl.common.config import Config, Machine
from meshrl.common.sockets import has_secret, tells_others
from meshrl.contract.errors import ConfigError, CorruptError, MeshError, UnavailableError, UserError
from meshrl.contract.ports import Judge
from meshrl.contract.types import Json, Outcome, Sample, Score
from meshrl.rewardd.pool.functions import numbers_of, texts_of, token_rewards_of
from meshrl.rewardd.pool.messages import DroppedKeys

RETRYABLE = {408, 425, 429, 500, 502, 503, 504}
MAX_ANSWER_BYTES = 16 << 20
CHUNK_BYTES = 1 << 16
MAX_SHOWN = 200
PLAIN = "a secret would travel to {url} unencrypted: use https://, or allow_plain_http in a network that you trust"
log = logging.getLogger(__name__)
T = TypeVar("T")


class RetryConfig(Config):
    """Deadline, retries and circuit breaker of a remote judge."""

    deadline_s: PositiveFloat = 60.0
    """Seconds for one sample (or one batch), all tries together."""
    retries: NonNegativeInt = 3
    """Tries after the first, for temporary failures: no connection, 408, 425, 429, 5xx."""
    pause_s: NonNegativeFloat = 0.5
    """Seconds before the first retry; doubled each time, up to `max_pause_s`; half of each pause is random."""
    max_pause_s: PositiveFloat = 20.0
    failures: PositiveInt = 8
    """Failures in a row, over all samples, that open the circuit."""
    cooldown_s: PositiveFloat = 10.0
    """Seconds until an open circuit lets one call through."""


class RemoteJudgeConfig(Config):
    """Options of every judge behind HTTP."""

    url: str
    """`http://` or `https://`; the judge's page says which path it adds."""
    token_env: str | None = None
    """The environment variable whose value is sent as a bearer token."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request."""
    allow_plain_http: bool = False
    """Send the token, or an `Authorization` of `headers`, also unencrypted beyond this machine: only in a network
    that you trust."""
    concurrency: PositiveInt = 32
    """Concurrent requests."""
    guard: RetryConfig = RetryConfig()
    """Deadline, retries, circuit breaker."""

    def faults(self, machine: Machine, model: Path) -> Iterator[tuple[str, str]]:
        """Faults of the address, and missing settings on this machine: the option, and one sentence."""
        if not self.url.startswith(("http://", "https://")):
            yield "url", f"{self.url!r} does not start with http:// or https://"
        if self.token_env is not None and self.token_env not in os.environ:
            yield "token_env", f"the variable {self.token_env} is not set"
        elif self.tells_a_secret:
            yield "url", PLAIN.format(url=self.url)

    @property
    def tells_a_secret(self) -> bool:
        """Whether a token or a header that identifies us would travel unencrypted."""
        secret = self.token_env is not None or has_secret(self.url, self.headers)
        return secret and tells_others(self.url) and not self.allow_plain_http


class RemoteJudge(Judge, ABC):
    """A judge on `_ask`, which scores one sample."""

    def __init__(self, kind: str, config: RemoteJudgeConfig) -> None:
        """Raises ConfigError if the variable of `token_env` is not set or `url` is not HTTP."""
        if not config.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"judge {kind}: url {config.url!r} does not start with http:// or https://"
            )
        headers = dict(config.headers)
        if config.token_env is not None:
            if config.token_env not in os.environ:
                raise ConfigError(
                    f"judge {kind}: the variable {config.token_env} (token_env) is not set"
                )
            headers["Authorization"] = f"Bearer {os.environ[config.token_env]}"
        if config.tells_a_secret:
            raise ConfigError(f"judge {kind}: {PLAIN.format(url=config.url)}")
        self._kind = kind
        self._url = config.url.rstrip("/")
        self._hash = hash_of(kind, config)
        self._retrier = Retrier(f"the {kind} judge at {config.url}", config.guard)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._dropped = DroppedKeys()
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(config.guard.deadline_s),
            limits=httpx.Limits(max_connections=config.concurrency),
            trust_env=False,
        )

    @property
    def reward_hash(self) -> str:
        """Hash of the kind and its options except addresses and deadlines; the remote program is not covered."""
        return self._hash

    async def start(self) -> None:
        """Sends nothing: a judge that is down now may be up when the first row comes."""
        return

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._client.aclose()

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One Score per sample, in order; a fault says what failed and where."""
        return await asyncio.gather(*(self._score(sample) for sample in samples))

    async def _score(self, sample: Sample) -> Score:
        try:
            async with self._slots:
                result = await self._retrier.ask(lambda: self._ask(sample))
            name = f"the {self._kind} judge"
            read = numbers_of(result, name)
            self._dropped.tell(read.dropped)
            length = sample.extra_info.get("response_length")
            tokens = token_rewards_of(result, name, length)
        except TimeoutError:
            return self._fault(sample, Outcome.TIMEOUT, "no score within its deadline")
        except MeshError as error:
            lasting = not error.retryable
            return self._fault(sample, Outcome.INFRA_FAULT, str(error), lasting=lasting)
        return Score(
            uid=sample.uid,
            outcome=Outcome.OK,
            score=read.score,
            components=read.others,
            reward_hash=self._hash,
            token_rewards=None if tokens is None else tuple(tokens),
            texts=texts_of(result),
        )

    def _fault(self, sample: Sample, outcome: Outcome, why: str, *, lasting: bool = False) -> Score:
        named = why if self._kind in why else f"the {self._kind} judge at {self._url}: {why}"
        return Score(
            uid=sample.uid,
            outcome=outcome,
            reason=named,
            reward_hash=self._hash,
            lasting=lasting,
        )

    @abstractmethod
    async def _ask(self, sample: Sample) -> Json:
        """A number, or a dict with `score`. Raises MeshError; retryable ones are retried."""

    async def post(self, path: str, body: Json) -> Json:
        """The JSON answer to `body`.

        Raises:
            UnavailableError: no connection, or a status that may be temporary.
            UserError: any other status but success, redirects too; quotes the answer.
            CorruptError: the answer is not JSON, or too large.
        """
        try:
            content = json.dumps(body).encode(errors="replace")
            answer, text = await self._whole(path, content)
        except (TypeError, ValueError) as error:
            raise UserError(f"the sample is not JSON: {error}") from error
        except httpx.HTTPError as error:
            raise UnavailableError(f"{type(error).__name__} {error}".strip()) from error
        if not answer.is_success:
            detail = " ".join(text.decode(errors="replace")[:MAX_SHOWN].split())
            kind = UnavailableError if answer.status_code in RETRYABLE else UserError
            raise kind(f"HTTP {answer.status_code} from {self._url}{path}: {detail}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"the answer of {self._url}{path} is not JSON: {error}") from error

    async def _whole(self, path: str, content: bytes) -> tuple[httpx.Response, bytes]:
        """An answer and its body; one without end is cut off. Raises CorruptError, httpx.HTTPError."""
        kind, text = {"Content-Type": "application/json"}, bytearray()
        url = self._url + path
        async with self._client.stream("POST", url, content=content, headers=kind) as answer:
            async for part in answer.aiter_bytes(CHUNK_BYTES):
                text += part
                if len(text) > MAX_ANSWER_BYTES:
                    raise CorruptError(f"{url} answers with more than {MAX_ANSWER_BYTES} bytes")
        return answer, bytes(text)


def hash_of(kind: str, config: RemoteJudgeConfig) -> str:
    """32 hex digits of SHA-256 over the options that decide a score."""
    content = config.model_dump(
        mode="json",
        exclude={"url", "token_env", "headers", "allow_plain_http", "concurrency", "guard"},
    )
    return hashlib.sha256(json.dumps([kind, content], sort_keys=True).encode()).hexdigest()[:32]


def conversation(sample: Sample) -> list[Mapping[str, Any]]:
    """The messages of the prompt, and the response as the assistant's message.

    Raises:
        UserError: the sample has no messages.
    """
    if not sample.messages:
        raise UserError("this judge reads conversations, and the sample has no messages")
    prompt = [{"role": m.role, "content": m.content} for m in sample.messages]
    return [*prompt, {"role": "assistant", "content": sample.solution}]


class Retrier:
    """One per remote judge."""

    def __init__(self, name: str, config: RetryConfig) -> None:
        """`name` is the judge's name in messages."""
        self._name = name
        self._config = config
        self._failures = 0
        self._last = ""
        self._open_until = 0.0
        self._probing = False
        self._draw = random.Random(name)

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer of `call`, which is retried as the config allows.

        Raises:
            TimeoutError: the deadline passed.
            UnavailableError: the circuit is open, or the last try failed; says why.
            MeshError: what `call` raised, if a retry cannot repair it.
        """
        async with asyncio.timeout(self._config.deadline_s):
            for number in range(self._config.retries + 1):
                if number:
                    await asyncio.sleep(self._pause(number))
                probe = self._enter()
                try:
                    answer = await call()
                except MeshError as error:
                    if not error.retryable:
                        self._succeeded()  # the judge answers, so the circuit stays closed
                        raise
                    self._failed(str(error))
                except asyncio.CancelledError:
                    self._failed(f"no answer within {self._config.deadline_s:g} s")
                    raise
                else:
                    self._succeeded()
                    return answer
                finally:
                    if probe:
                        self._probing = False
        raise UnavailableError(f"{self._name}: {self._last} ({self._config.retries + 1} tries)")

    def _pause(self, number: int) -> float:
        pause = min(self._config.pause_s * 2.0 ** (number - 1), self._config.max_pause_s)
        return pause * (0.5 + 0.5 * self._draw.random())

    def _enter(self) -> bool:
        """Raise if the circuit is open; True for the one call that probes whether the judge is back."""
        if self._failures < self._config.failures:
            return False
        left = self._open_until - time.monotonic()
        if left > 0 or self._probing:
            raise UnavailableError(
                f"{self._name} failed {self._failures} times in a row: it is not called"
                f" for {max(left, 0):.1f} s more: {self._last}"
            )
        self._probing = True
        return True

    def _failed(self, why: str) -> None:
        self._failures += 1
        self._last = why
        if self._failures >= self._config.failures:
            if self._failures == self._config.failures:
                log.warning("%s failed %d times in a row: %s", self._name, self._failures, why)
            self._open_until = time.monotonic() + self._config.cooldown_s

    def _succeeded(self) -> None:
        self._failures = 0

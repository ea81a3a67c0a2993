"""A scoring process (`python -P -m meshrl.rewardd.pool.scoring_process <parent pid>`): samples in, scores out.

    stdin  ◀── {"load": rule, …}, then {"score": [sample, …]} again and again
    stdout ──▶ {"ready": …} or {"refused": why}, then one {"id", "score" | "fault" …} per sample, as it is done

First the pipes are moved away from file descriptors 0 and 1, so that a function may print and read without harm. Its
output goes to stderr, which the service drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from meshrl.common.process_guard import die_with_parent
from meshrl.contract.errors import MeshError
from meshrl.contract.types import Json, Outcome
from meshrl.rewardd.pool.functions import Scorer, combine, describe, load, where
from meshrl.rewardd.pool.messages import encode_frame, read_frame
from meshrl.rewardd.pool.rule import RewardRule
from meshrl.sandbox import confinement

WHERE_SIGNAL = signal.SIGUSR2
"""On this signal the process writes its current line to stderr, even while it is stuck in C code."""


def move_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Copies of the pipes that child processes do not inherit; fd 0 becomes /dev/null and fd 1 a second stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


class ScoringLoop:
    """Scores samples with one rule until the requests end."""

    def __init__(self, scorers: tuple[Scorer, ...], options: Json, replies: BinaryIO) -> None:
        self._scorers = scorers
        self._deadline_s: float = options["limits"]["deadline_s"]
        self._cpu_limit_s: int | None = options["limits"]["cpu_s"]
        self._replies = replies

    @property
    def batched(self) -> bool:
        """True when the rule is one batch function: then samples are scored together."""
        return len(self._scorers) == 1 and self._scorers[0].together is not None

    def reply(self, *messages: Json) -> None:
        """Send complete frames, together."""
        view = memoryview(b"".join(map(encode_frame, messages)))
        while view:
            view = view[self._replies.write(view) :]

    def allow_cpu(self) -> None:
        """Allow `cpu_s` more seconds from now on; beyond them the kernel ends the process with SIGXCPU."""
        if self._cpu_limit_s is None:
            return
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(usage.ru_utime + usage.ru_stime) + 1 + self._cpu_limit_s
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))

    async def score(self, sample: Json) -> Json:
        """Run every function on one sample; a failure becomes a result with its reason."""
        number = sample.pop("id")
        self.allow_cpu()
        limit_s = asyncio.timeout(self._deadline_s)
        try:
            results: list[Any] = []
            async with limit_s:
                for scorer in self._scorers:
                    result = scorer.start(sample)
                    results.append(await result if inspect.isawaitable(result) else result)
            return {"id": number, **combine(self._scorers, results, _length(sample))}
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # The user's code may raise anything; it becomes the result of this sample only.
            if isinstance(error, TimeoutError) and limit_s.expired():
                # The timeout was raised from the cancelled await, which knows its line.
                line = where(error.__context__ or error)
                reason = f"no score after {self._deadline_s:g} s{line}"
                return {"id": number, "fault": Outcome.TIMEOUT, "reason": reason}
            return {"id": number, **_fault(error)}

    def score_together(self, samples: list[Json]) -> list[Json]:
        """Run a batch function once on all samples; if it fails, run it on each sample alone."""
        self.allow_cpu()
        try:
            (scorer,) = self._scorers
            results = scorer.start_batch(samples)
            return [
                {"id": sample["id"], **self._combined(result, _length(sample))}
                for sample, result in zip(samples, results, strict=True)
            ]
        except (Exception, SystemExit) as error:
            if len(samples) > 1:
                return [answer for sample in samples for answer in self.score_together([sample])]
            return [{"id": samples[0]["id"], **_fault(error)}]

    def _combined(self, result: Any, length: int | None) -> Json:
        """The answer for one sample; a bad score is a fault of that sample only."""
        try:
            return combine(self._scorers, [result], length)
        except MeshError as error:
            return {"fault": Outcome.INFRA_FAULT, "reason": describe(error)}

    async def serve(self, requests: BinaryIO, concurrent: bool) -> None:
        """Answer requests until they end. Plain functions run one after the other, `async def` ones concurrently."""
        if self.batched:
            while (message := read_frame(requests)) is not None:
                self.reply(*self.score_together(message["score"]))
            return
        if not concurrent:
            while (
                message := read_frame(requests)
            ) is not None:  # blocking is fine: nothing else runs in this event loop
                for sample in message["score"]:
                    self.reply(await self.score(sample))
            return
        async with asyncio.TaskGroup() as group:
            while (message := await asyncio.to_thread(read_frame, requests)) is not None:
                for sample in message["score"]:
                    group.create_task(self._score_and_reply(sample))

    async def _score_and_reply(self, sample: Json) -> None:
        self.reply(await self.score(sample))


def _fault(error: BaseException) -> Json:
    """The answer for a sample on which a function raised; whether it took more than there is."""
    fault: Json = {"fault": Outcome.INFRA_FAULT, "reason": describe(error)}
    return {**fault, "exceeded": True} if isinstance(error, MemoryError | RecursionError) else fault


def _length(sample: Json) -> int | None:
    """Number of response tokens, if the caller counted them."""
    length = (sample["extra_info"] or {}).get("response_length")
    return length if isinstance(length, int) else None


def main() -> None:
    """Load the rule of the first request, then score."""
    # 0: the sandbox ends the process. Other systems than Linux: the end of stdin does.
    if parent := int(sys.argv[1]):
        die_with_parent(parent)
    requests, replies = move_pipes()
    faulthandler.enable()
    faulthandler.register(WHERE_SIGNAL, all_threads=False)
    message = read_frame(requests)
    if message is None:
        return
    confinement.confine(message["confinement"], message["limits"])
    try:
        scorers = tuple(load(spec) for spec in RewardRule.from_json(message["load"]).functions)
    except MeshError as error:
        replies.write(encode_frame({"refused": error.message}))
        return
    except MemoryError:
        bound = message["limits"]["memory_bytes"]
        replies.write(
            encode_frame({"refused": f"loading needs more memory than the limit of {bound} bytes"})
        )
        return
    concurrent = any(scorer.concurrent for scorer in scorers)
    loop = ScoringLoop(scorers, message, replies)
    loop.reply({"ready": True, "concurrent": concurrent, "batched": loop.batched})
    # The service has ended: nobody reads the answer.
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(loop.serve(requests, concurrent))


if __name__ == "__main__":
    main()

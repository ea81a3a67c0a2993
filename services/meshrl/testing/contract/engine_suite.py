"""Promises that every engine must keep. A test class inherits it and says how to build an engine."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import EngineGoneError, MeshError, NotFoundError, UserError
from meshrl.contract.ports import Engine
from meshrl.contract.types import (
    GenerateDelta,
    GenerateRequest,
    Int32,
    OnUpdate,
    SamplingParams,
    Uint8,
    Version,
    WeightManifest,
)
from meshrl.rollout.generation_checkpoint import continuation
from meshrl.rollout.streams import Response, closing, sample
from meshrl.rollout.time_slices import SleepingEngine

SLOTS = 4
LONG = 3000
"""Response tokens of a request that runs on while something else happens."""


def ask(name: str, *, max_tokens: int = 12, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.array([5, 6, 7, 8], dtype=np.int32),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
    )


def said(tokens: Sequence[int] | Int32) -> GenerateDelta:
    return GenerateDelta(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        version=Version(1, 0),
    )


async def until_running(engine: Engine, count: int) -> None:
    while engine.stats().running < count:  # noqa: ASYNC110 (the port has no event)
        await asyncio.sleep(0.001)


class EngineSuite(ABC):
    """Subclasses give the fixture `engine`: started, nothing committed, SLOTS slots, no end-of-sequence token."""

    @abstractmethod
    def weights(self, version: Version) -> tuple[WeightManifest, Sequence[Uint8]]:
        """A version that fits the engine's model."""

    async def commit(
        self, engine: Engine, step: int, on_update: OnUpdate = OnUpdate.IN_FLIGHT
    ) -> Version:
        version = Version(1, step)
        manifest, buckets = self.weights(version)
        await engine.stage_weights(manifest, buckets)
        await engine.commit_weights(version, on_update)
        return version

    async def test_requests_wait_for_the_first_committed_version(self, engine: Engine) -> None:
        early = asyncio.create_task(sample(engine, ask("a")))
        await asyncio.sleep(0.05)
        assert not early.done()
        assert engine.version == Version(0, 0)
        version = await self.commit(engine, 0)
        answer = await early
        assert [span.version for span in answer.spans] == [version]

    async def test_a_response_has_one_logprob_per_token_and_its_reason_last(
        self, engine: Engine
    ) -> None:
        await self.commit(engine, 0)
        deltas: list[GenerateDelta] = []
        async with closing(engine.generate(ask("a"))) as stream:
            async for delta in stream:
                deltas.append(delta)
        assert sum(len(delta.tokens) for delta in deltas) == 12
        for delta in deltas:
            assert delta.tokens.dtype == np.int32 and delta.logprobs.dtype == np.float32
            assert len(delta.tokens) == len(delta.logprobs)
            assert (delta.logprobs <= 0).all()
        assert [delta.finish_reason for delta in deltas[:-1]] == [""] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == "length"

    @pytest.fixture
    def seeds(self) -> bool:
        """Whether the engine's server honours a request's seed."""
        return True

    async def test_the_same_request_twice_gives_the_same_tokens(
        self, engine: Engine, seeds: bool
    ) -> None:
        if not seeds:
            pytest.skip("this server draws without the request's seed")
        await self.commit(engine, 0)
        first, again = [await sample(engine, ask("a", seed=4)) for _ in range(2)]
        assert first.tokens.tolist() == again.tokens.tolist()

    @pytest.mark.parametrize("already", [1, 7, 11, 12])
    async def test_a_continued_response_continues_where_it_stopped(
        self, engine: Engine, already: int
    ) -> None:
        await self.commit(engine, 0)
        whole = await sample(engine, ask("a", temperature=0.0))
        rest = await sample(
            engine,
            continuation(ask("a", temperature=0.0), [said(whole.tokens[:already])]),
        )
        assert rest.tokens.tolist() == whole.tokens[already:].tolist()
        assert rest.finish_reason == "length"

    async def test_a_request_with_no_prompt_before_its_continuation_is_refused(
        self, engine: Engine
    ) -> None:
        await self.commit(engine, 0)
        with pytest.raises(UserError, match=r"prompt is empty: all of it is continued \(4 tokens"):
            await sample(engine, replace(ask("a"), continued=4))

    async def test_more_requests_than_slots_are_all_answered(self, engine: Engine) -> None:
        await self.commit(engine, 0)
        lengths = [3 + 5 * i for i in range(3 * SLOTS)]
        answers = await asyncio.gather(
            *(sample(engine, ask(str(n), max_tokens=n)) for n in lengths)
        )
        assert [len(answer.tokens) for answer in answers] == lengths
        stats = engine.stats()
        assert (stats.running, stats.capacity) == (0, SLOTS)
        assert stats.tokens_generated == sum(lengths)

    async def test_closing_a_stream_frees_its_slot(self, engine: Engine) -> None:
        await self.commit(engine, 0)
        for i in range(2 * SLOTS):  # more than there are slots: a leak would stop this
            async with closing(engine.generate(ask(str(i), max_tokens=LONG))) as stream:
                await anext(stream)
        answers = await asyncio.gather(*(sample(engine, ask(f"b{i}")) for i in range(SLOTS)))
        assert {answer.finish_reason for answer in answers} == {"length"}
        assert engine.stats().running == 0

    async def test_cancelling_a_reader_frees_its_slot(self, engine: Engine) -> None:
        await self.commit(engine, 0)
        readers = [
            asyncio.create_task(sample(engine, ask(str(i), max_tokens=LONG)))
            for i in range(2 * SLOTS)
        ]
        await until_running(engine, SLOTS)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        assert len((await sample(engine, ask("after"))).tokens) == 12

    async def test_staging_changes_nothing_that_is_served(self, engine: Engine) -> None:
        version = await self.commit(engine, 0)
        before = await sample(engine, ask("a", temperature=0.0))
        manifest, buckets = self.weights(Version(1, 1))
        await engine.stage_weights(manifest, buckets)
        after = await sample(engine, ask("a", temperature=0.0))
        assert engine.version == version
        assert after.tokens.tolist() == before.tokens.tolist()
        assert [span.version for span in after.spans] == [version]

    async def test_committing_what_is_not_staged_is_refused(self, engine: Engine) -> None:
        with pytest.raises(NotFoundError, match=r"1\.7"):
            await engine.commit_weights(Version(1, 7), OnUpdate.IN_FLIGHT)
        manifest, buckets = self.weights(Version(1, 7))
        await engine.stage_weights(manifest, buckets)
        await engine.discard_weights(Version(1, 7))
        await engine.discard_weights(Version(1, 7))
        with pytest.raises(NotFoundError):
            await engine.commit_weights(Version(1, 7), OnUpdate.IN_FLIGHT)

    async def test_committing_twice_is_committing_once(self, engine: Engine) -> None:
        version = await self.commit(engine, 0)
        await engine.commit_weights(version, OnUpdate.DRAIN)
        assert engine.version == version
        assert engine.stats().updates == 1

    async def test_an_older_version_is_never_served_again(self, engine: Engine) -> None:
        version = await self.commit(engine, 5)
        with pytest.raises(MeshError):
            await self.commit(engine, 4)
        assert engine.version == version

    @pytest.mark.parametrize("on_update", [OnUpdate.IN_FLIGHT, OnUpdate.INTERRUPT])
    async def test_an_update_in_flight_changes_the_version_at_one_exact_token(
        self, engine: Engine, on_update: OnUpdate
    ) -> None:
        new = await self.commit(engine, 0)
        # On a busy machine a response may end before the update begins: then it says nothing, and the next one may.
        for step in range(1, 6):
            old = new
            async with closing(engine.generate(ask(str(step), max_tokens=LONG))) as stream:
                versions = [(await anext(stream)).version]
                new = await self.commit(engine, step, on_update)
                async for delta in stream:
                    versions.append(delta.version)
                    if delta.version == new:
                        break
            assert set(versions) <= {old, new}
            if versions[-1] == new:
                break
        assert versions[-1] == new
        assert set(versions[:-1]) == {old}

    async def test_a_draining_update_lets_running_requests_finish_and_delays_new_ones(
        self, engine: Engine
    ) -> None:
        old = await self.commit(engine, 0)
        running = asyncio.create_task(sample(engine, ask("a", max_tokens=LONG // 4)))
        await until_running(engine, 1)
        update = asyncio.create_task(self.commit(engine, 1, OnUpdate.DRAIN))
        answer: Response = await running
        new = await update
        later = await sample(engine, ask("b"))
        assert [span.version for span in answer.spans] == [old]
        assert len(answer.tokens) == LONG // 4
        assert [span.version for span in later.spans] == [new]

    async def test_a_sleeping_engine_samples_nothing_and_goes_on_where_it_was(
        self, engine: Engine
    ) -> None:
        if not isinstance(engine, SleepingEngine):
            pytest.skip("it has no device to give up")
        version = await self.commit(engine, 0)
        async with closing(engine.generate(ask("a", max_tokens=LONG))) as stream:
            versions = [(await anext(stream)).version]
            await engine.sleep()
            await engine.sleep()
            try:
                waiting = asyncio.create_task(sample(engine, ask("b")))
                await asyncio.sleep(0.05)
                assert (engine.asleep, waiting.done()) == (True, False)
                # A busy server may have sampled all of "a" before it slept.
                assert engine.stats().running <= 1
            finally:
                await engine.wake()  # others ask the same server next
            await engine.wake()
            assert not engine.asleep
            versions += [(await anext(stream)).version for _ in range(3)]
        assert set(versions) == {version}
        assert [span.version for span in (await waiting).spans] == [version]

    async def test_a_commit_wakes_a_sleeping_engine_with_the_new_version(
        self, engine: Engine
    ) -> None:
        if not isinstance(engine, SleepingEngine):
            pytest.skip("it has no device to give up")
        await engine.sleep()
        await engine.wake()  # with nothing: there is no version yet
        for step in range(0, 20, 2):
            old = await self.commit(engine, step, OnUpdate.DRAIN)
            async with closing(engine.generate(ask("a", max_tokens=LONG))) as stream:
                versions = [(await anext(stream)).version]
                await engine.sleep()
                new = await self.commit(engine, step + 1)
                async for delta in stream:
                    versions.append(delta.version)
                    if delta.version == new:
                        break
            assert set(versions) <= {old, new}
            assert (engine.asleep, engine.version) == (False, new)
            if versions[-1] == new:  # else a busy server had sampled all of it before it slept
                break
        assert versions[-1] == new and set(versions[:-1]) == {old}, versions

    async def test_an_invalid_request_is_a_user_error(self, engine: Engine) -> None:
        await self.commit(engine, 0)
        with pytest.raises(UserError, match="max_tokens"):
            await sample(engine, ask("a", max_tokens=0))

    async def test_closing_the_engine_ends_every_request_and_may_be_repeated(
        self, engine: Engine
    ) -> None:
        await self.commit(engine, 0)
        readers = [
            asyncio.create_task(sample(engine, ask(str(i), max_tokens=LONG)))
            for i in range(2 * SLOTS)
        ]
        await until_running(engine, SLOTS)
        await engine.close()
        await engine.close()
        answers = await asyncio.gather(*readers)
        assert {answer.finish_reason for answer in answers} == {"abort"}
        with pytest.raises(EngineGoneError):
            await sample(engine, ask("late"))

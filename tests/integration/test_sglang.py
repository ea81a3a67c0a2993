"""The sglang engine against a server of ours with SGLang's routes, bodies and failure answers.

No SGLang runs here: what is proved is that the engine does the right thing with what 0.5.23 says in its sources.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshrl.contract.errors import InfraError, UserError
from meshrl.contract.types import OnUpdate, Version
from meshrl.rollout.engines.sglang import LOADER, build
from meshrl.rollout.ports import UNSERVED
from meshrl.rollout.server_engine.engine import ServerEngine
from meshrl.rollout.streams import Response, closing, sample
from meshrl.testing.contract.engine_suite import SLOTS, ask
from meshrl.testing.sglang_server.routes import NOT_FLUSHED

from .. import servers
from ..sglang_checkpoint import (
    EOS,
    cache_marks,
    fault,
    make_checkpoint,
    mislabelled,
    post,
    state,
    weights,
)
from ..sglang_conversation import differences, hold
from ..waiting import until

BOOKED = "--disable-overlap-schedule"
LONG = 2000
LABELLED_TOKENS = int(os.environ.get("MESHRL_LABELLED_TOKENS", "104000"))
"""Tokens whose labels are checked; more on demand."""
Maker = Callable[..., Awaitable[ServerEngine]]


class Words:
    """A tokenizer: token 7 is `w7 `."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"w{token} " for token in ids)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), max_length=2 * LONG)


@pytest.fixture
async def make(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Maker]:
    engines: list[ServerEngine] = []

    async def build_one(
        *arguments: str, slots: int = SLOTS, url: str | None = None, **options: Any
    ) -> ServerEngine:
        options |= (
            {"url": url} if url else {"command": servers.COMMAND, "extra_args": list(arguments)}
        )
        started = {} if url else {"env": servers.environment(servers.OURS)}
        options = {"eos_token_ids": [], "log": str(tmp_path / "log"), **started, **options}
        engine = build(options, model=checkpoint, slots=slots, tokenizer=Words())
        engines.append(engine)
        await engine.start()
        return engine

    yield build_one
    for engine in engines:
        await engine.close()


async def commit(
    engine: ServerEngine, step: int, on_update: OnUpdate = OnUpdate.IN_FLIGHT
) -> Version:
    version = Version(1, step)
    await engine.stage_weights(*weights(version))
    await engine.commit_weights(version, on_update)
    return version


NEVER = ""


async def begun(engine: ServerEngine, label: str) -> asyncio.Task[Response]:
    """A request that has its first tokens and cannot end before the server's label is `label`."""
    await fault(engine.url, holds=[[100, label]])
    before = engine.stats().tokens_generated
    running = asyncio.create_task(sample(engine, ask(f"until {label}", max_tokens=LONG)))
    await until(lambda: not (engine.stats().tokens_generated == before and not running.done()))
    return running


def lose_newest_file(staging: Path) -> None:
    """Delete the newest staged file behind the engine's back."""
    files = list(staging.glob("*/*/model.safetensors"))
    max(files, key=lambda file: int(file.parent.name)).unlink()


async def test_the_fake_answers_as_sglang_did(make: Maker) -> None:
    """The record is of a real server: `test_real_servers.py` holds it against one."""
    engine = await make(BOOKED)
    ours = await hold(engine.url, "")
    theirs = json.loads(
        (Path(__file__).parents[1] / "fixtures/sglang_conversation.json").read_text()
    )
    assert [each["route"] for each in ours] == [each["route"] for each in theirs]
    found = [d for a, b in zip(ours, theirs, strict=True) for d in differences(a, b, a["route"])]
    assert found == []


# Capacity


async def test_rows_are_leased_by_the_tokens_that_the_servers_cache_holds(make: Maker) -> None:
    engine = await make("--max-total-tokens", "8000", slots=64)
    assert engine.stats().capacity == 8000 // (2 * LONG)  # nothing is known but what may be asked
    await commit(engine, 1)
    await sample(engine, ask("short", max_tokens=90))
    total = len(ask("short", max_tokens=90).prompt_ids) + 90
    assert engine.stats().capacity == min(64, 8000 // total)


async def test_slots_are_the_bound_if_the_server_does_not_report_its_cache(make: Maker) -> None:
    engine = await make("--max-total-tokens", "0", slots=5)
    assert engine.stats().capacity == 5


# Updates


@pytest.mark.parametrize(
    ("arguments", "on_update", "mode", "flushed"),
    [
        ([], OnUpdate.IN_FLIGHT, "retract", False),
        ([BOOKED], OnUpdate.IN_FLIGHT, "in_place", False),
        ([BOOKED], OnUpdate.DRAIN, "in_place", False),
        ([BOOKED], OnUpdate.INTERRUPT, "retract", True),
    ],
    ids=str,
)
async def test_an_update_uses_sglangs_routes_and_bodies(
    make: Maker, arguments: list[str], on_update: OnUpdate, mode: str, flushed: bool
) -> None:
    engine = await make(*arguments, "--tp-size", "2")
    await commit(engine, 3, on_update)
    calls = (await state(engine.url))["calls"]
    routes = [route for route, _ in calls]
    assert routes == [
        "/pause_generation",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        *(["/flush_cache"] if flushed else []),
        "/continue_generation",
    ]
    assert calls[0][1] == {"mode": mode}
    update = calls[2][1]
    assert len(update.pop("serialized_named_tensors")) == 2  # one a rank
    assert update == {"load_format": LOADER, "weight_version": "1.3", "flush_cache": False}
    assert calls[-1][1] == {"torch_empty_cache": False}


@pytest.mark.parametrize("arguments", [[], [BOOKED]], ids=["overlap", "no overlap"])
async def test_no_token_is_mislabelled_during_updates(make: Maker, arguments: list[str]) -> None:
    requests, wanted = 32, LABELLED_TOKENS // 2
    engine = await make(*arguments, slots=requests)
    await commit(engine, 0)
    length = min(wanted // requests, 2 * LONG - 8)
    step, answers = 0, []
    quarter = requests * length // 4
    while len(answers) * length < wanted:
        # Nothing is sampled before all requests are there, and no response ends before its updates.
        await fault(engine.url, holds=[[i * quarter, f"1.{step + i + 1}"] for i in range(4)])
        running = [
            asyncio.create_task(sample(engine, ask(f"{step}.{i}", max_tokens=length)))
            for i in range(requests)
        ]
        while len((await state(engine.url))["requests"]) < requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        seen = len(answers) * length
        for i in range(4):
            far_enough = seen + (i - 1) * quarter + 50 * requests
            while i and engine.stats().tokens_generated < far_enough:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            step += 1
            await commit(engine, step, OnUpdate.INTERRUPT if i == 2 else OnUpdate.IN_FLIGHT)
        answers += await asyncio.gather(*running)
    assert sum(len(answer.tokens) for answer in answers) >= wanted
    assert {len(answer.spans) for answer in answers} == {4}
    assert sum(mislabelled(answer) for answer in answers) == 0


async def test_the_fake_mislabels_as_sglang_does_when_paused_in_place_with_an_unrecorded_step(
    make: Maker,
) -> None:
    """Why an overlapping server is retracted: without that the check above would fail."""
    engine = await make()
    client: Any = engine._server.client
    client.facts = client.facts.__class__(
        **{name: getattr(client.facts, name) for name in client.facts.__dataclass_fields__}
        | {"overlaps": False}
    )
    await commit(engine, 0)
    running = await begun(engine, label="1.1")
    await commit(engine, 1)
    assert mislabelled(await running) == 1


@pytest.mark.parametrize(
    ("arguments", "on_update", "renewed"),
    [
        ([BOOKED], OnUpdate.IN_FLIGHT, False),
        ([BOOKED], OnUpdate.INTERRUPT, True),
        ([], OnUpdate.INTERRUPT, True),
    ],
    ids=str,
)
async def test_running_requests_keep_their_cache_in_flight_and_recompute_it_when_interrupted(
    make: Maker, arguments: list[str], on_update: OnUpdate, renewed: bool
) -> None:
    engine = await make(*arguments)
    await commit(engine, 1)
    running = await begun(engine, label="1.2")
    await commit(engine, 2, on_update)
    answer = await running
    border = answer.spans[0].end
    assert [span.version.step for span in answer.spans] == [1, 2]
    assert set(cache_marks(answer)[:border]) == {1}
    assert set(cache_marks(answer)[border:]) == {2 if renewed else 1}
    # The same prompt, whose prefix was cached under the old weights.
    later = await sample(engine, ask("b"))
    assert set(cache_marks(later)) == {2}


async def test_prefixes_that_another_engine_cached_under_the_same_label_are_not_found(
    make: Maker,
) -> None:
    owner = await make()
    for step, on_update in enumerate([*OnUpdate, *OnUpdate], 1):
        engine = await make(url=owner.url)
        manifest, buckets = weights(Version(1, step))
        same_label = Version(5, 0)
        await engine.stage_weights(replace(manifest, version=same_label), buckets)
        await engine.commit_weights(same_label, on_update)
        assert set(cache_marks(await sample(engine, ask("a")))) == {step}


async def test_prefixes_that_another_engine_cached_between_two_loads_are_not_found(
    make: Maker,
) -> None:
    engine = await make()
    other = await make(url=engine.url)
    await commit(engine, 1)
    first = await sample(engine, ask("a"))
    await commit(other, 2)
    with pytest.raises(InfraError, match=r"1\.2"):
        await sample(engine, ask("a"))  # cached by other weights under the salt of the first load
    again = await sample(engine, ask("a"))  # the engine has loaded its weights again
    assert set(cache_marks(first)) == set(cache_marks(again)) == {1}


async def test_the_other_update_route_serves_the_same_weights(make: Maker) -> None:
    engine = await make(BOOKED, update="disk")
    for step in (1, 2):
        await commit(engine, step)
        answer = await sample(engine, ask(str(step)))
        assert set(answer.tokens.tolist()) == {step}
    running = await begun(engine, label="1.3")
    await commit(engine, 3)
    answer = await running
    assert [span.version.step for span in answer.spans] == [2, 3]
    assert mislabelled(answer) == 0


# Failures

FAILURES = [
    ("/pause_generation", 500, "Internal Server Error"),
    ("/begin_weight_update", 400, "a weight-update session is already open"),
    ("/update_weights_from_tensor", 400, NOT_FLUSHED),
    (
        "/update_weights_from_tensor",
        400,
        "Failed to update parameter online: x",
    ),
    ("/end_weight_update", 400, "no weight-update session is open"),
    ("/flush_cache", 400, "Flush cache failed."),
    ("/continue_generation", 503, "Service Unavailable"),
]


async def test_a_server_whose_update_failed_is_replaced_and_serves_nothing_until_the_next_version(
    make: Maker,
) -> None:
    engine = await make()
    for number, (route, status, message) in enumerate(FAILURES):
        good, bad, next_one = range(3 * number, 3 * number + 3)
        await commit(engine, good)
        poisoned = engine.url
        await fault(poisoned, route=route, status=status, message=message)
        running = await begun(engine, label=NEVER)
        with pytest.raises(
            InfraError, match=f"loading weights 1.{bad} failed in SGLang: .*{route}"
        ) as said:
            await commit(engine, bad, OnUpdate.INTERRUPT)
        assert message[:40] in str(said.value) and "\n" not in str(said.value)
        assert engine.version == UNSERVED
        waiting = asyncio.create_task(sample(engine, ask("b")))
        await commit(engine, next_one)
        assert engine.url != poisoned
        with pytest.raises(InfraError):
            await running  # its server is gone
        answer = await waiting
        assert [span.version.step for span in answer.spans] == [next_one]
        assert mislabelled(answer) == 0


async def test_tokens_of_half_a_version_are_never_delivered(make: Maker) -> None:
    engine = await make(update="disk")
    await commit(engine, 1)
    running = await begun(engine, label=NEVER)
    await fault(engine.url, partial=True)
    with pytest.raises(InfraError, match="ends too soon"):
        await commit(engine, 2)
    with pytest.raises(InfraError):
        await running
    await commit(engine, 3)
    assert mislabelled(await sample(engine, ask("b"))) == 0


async def test_a_loader_that_raises_ends_the_server_and_the_next_one_says_so(
    make: Maker, tmp_path: Path
) -> None:
    engine = await make(staging=str(tmp_path))
    await commit(engine, 1)
    await engine.stage_weights(*weights(Version(1, 2)))
    lose_newest_file(tmp_path)
    with pytest.raises(
        InfraError, match=r"loading weights 1\.2 failed in SGLang.*exit code 1: .*no \*.safetensors"
    ):
        await engine.commit_weights(Version(1, 2), OnUpdate.IN_FLIGHT)
    await commit(engine, 3)
    assert mislabelled(await sample(engine, ask("b"))) == 0


@pytest.mark.parametrize("killed", [False, True], ids=["does_not_sleep", "dies_asleep"])
async def test_a_server_that_cannot_sleep_or_dies_asleep_starts_again_when_the_engine_wakes(
    make: Maker, killed: bool
) -> None:
    engine = await make()
    version = await commit(engine, 0)
    url = engine.url
    if killed:
        await engine.sleep()
        with pytest.raises(httpx.HTTPError):
            await post(url, "/continue_generation", {})  # without memory: it dies
    else:
        problem = {"status": 500, "message": "no memory saver"}
        await fault(url, route="/release_memory_occupation", **problem)
        await engine.sleep()
    await asyncio.sleep(0.3)
    with pytest.raises(httpx.ConnectError):
        await state(url)
    assert engine.asleep  # the device is another one's: nothing starts there
    await engine.wake()
    assert (engine.asleep, engine.version) == (False, version)
    assert engine.url != url
    answer = await sample(engine, ask("a"))
    assert [span.version for span in answer.spans] == [version]


async def test_a_server_that_dies_in_mid_stream_comes_back_with_the_served_version(
    make: Maker,
) -> None:
    engine = await make()
    await commit(engine, 1)
    dead = engine.url
    await fault(dead, die_at=int((await state(dead))["tokens"]) + 500)
    running = [asyncio.create_task(sample(engine, ask(str(i), max_tokens=LONG))) for i in range(4)]
    failed = await asyncio.gather(*running, return_exceptions=True)
    assert {type(error) for error in failed} == {InfraError}
    answer = await sample(engine, ask("after"))
    assert engine.url != dead
    assert [span.version.step for span in answer.spans] == [1]
    assert mislabelled(answer) == 0


REFUSALS = [(503, InfraError), (500, InfraError), (429, InfraError), (400, UserError)]


async def test_a_refused_request_fails_alone(make: Maker) -> None:
    """Refused by its status or by an event of its stream."""
    engine = await make()
    await commit(engine, 1)
    for (status, kind), streamed in itertools.product(REFUSALS, (False, True)):
        refusal = {"status": status, "message": "The queue is full.", "streamed": streamed}
        await fault(engine.url, route="/generate", **refusal)
        with pytest.raises(kind, match="The queue is full"):
            await sample(engine, ask("a"))
        assert len((await sample(engine, ask("b"))).tokens) == 12


async def test_a_silent_server_fails_the_request_and_is_replaced(
    make: Maker, tmp_path: Path
) -> None:
    engine = await make(silence_s=0.5, update_s=2.0)
    assert engine.where == f"SGLang at {engine.url} (log: {tmp_path / 'log'})"
    await commit(engine, 1)
    silent = engine.url
    running = await begun(engine, label=NEVER)
    await fault(silent, stalled=True)
    with pytest.raises(InfraError, match="broke off a response"):
        await running
    assert len((await sample(engine, ask("b"))).tokens) == 12
    assert engine.url != silent


CHANGES = [
    ("/abort_request", {"abort_all": True}, "ended a request by itself: abort"),
    # It aborts everything unless told not to.
    ("/update_weight_version", {"new_version": "1.5"}, "ended a request by itself: abort"),
    (
        "/update_weight_version",
        {"new_version": "9.9", "abort_all_requests": False},
        "by '9.9', the server was left at 1.1: another program changes its weights",
    ),
]


async def test_responses_that_another_client_changed_are_faults(make: Maker) -> None:
    engine = await make("--step-s", "0.001")
    await commit(engine, 1)
    for route, body, said in CHANGES:
        running = await begun(engine, label=str(body.get("new_version", NEVER)))
        await post(engine.url, route, body)
        with pytest.raises(InfraError, match=said):
            await running
        await fault(engine.url, holds=[])
        after = await sample(engine, ask("b"))
        assert [span.version.step for span in after.spans] == [1]
        assert mislabelled(after) == 0


# Requests


async def test_a_response_ends_with_its_stop_found_by_server_or_engine(make: Maker) -> None:
    engine = await make()
    await commit(engine, 1)
    await fault(engine.url, says_mark=False)
    whole = (await sample(engine, ask("a", max_tokens=60))).tokens.tolist()
    wanted = whole[20]
    end = whole.index(wanted) + 1
    by_id = await sample(engine, ask("a", max_tokens=60, stop_token_ids=(wanted,)))
    by_server = await sample(engine, ask("a", max_tokens=60, stop_token_ids=(wanted, EOS)))
    by_text = await sample(engine, ask("a", max_tokens=60, stop=(f"w{wanted} ",)))
    for answer in (by_id, by_server, by_text):
        assert answer.tokens.tolist() == whole[:end]
        assert (answer.finish_reason, len(answer.logprobs)) == ("stop", end)


async def test_a_stream_whose_events_repeat_the_response_so_far_is_read_once(make: Maker) -> None:
    engine = await make("--cumulative-streaming-output")
    await commit(engine, 1)
    running = await begun(engine, label="1.2")
    await commit(engine, 2)
    answer = await running
    assert (len(answer.tokens), len(answer.spans)) == (LONG, 2)
    assert mislabelled(answer) == 0


async def test_closing_a_stream_aborts_at_the_server(make: Maker) -> None:
    engine = await make("--step-s", "0.001")
    await commit(engine, 1)
    async with closing(engine.generate(ask("a", max_tokens=LONG))) as stream:
        await anext(stream)
        assert len((await state(engine.url))["requests"]) == 1
    assert len((await sample(engine, ask("b"))).tokens) == 12
    found = await state(engine.url)
    assert found["requests"] == []
    assert "/abort_request" in [route for route, _ in found["calls"]]


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (["--dp-size", "2"], {}, "--dp-size 2: it refuses weights; want one server a replica"),
        (["--weight-cache-mode", "shared"], {}, "--weight-cache-mode shared"),
        (["--context-length", "64"], {}, f"allows 58 tokens .* the engine {2 * LONG}"),
        (["--max-total-tokens", "64"], {}, f"cache holds 64 tokens, the engine wants {2 * LONG}"),
        (["--without-route", "/begin_weight_update"], {}, "has no route /begin_weight_update"),
        (["--custom-weight-loader", "other.load"], {}, f"without --custom-weight-loader {LOADER}"),
    ],
    ids=lambda each: str(each)[:30],
)
async def test_a_server_that_would_fail_later_is_refused_at_the_start(
    make: Maker, arguments: list[str], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as raised:
        await make(*arguments, **options)
    assert "\n" not in str(raised.value)

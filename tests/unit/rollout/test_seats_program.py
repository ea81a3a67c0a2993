"""The program `seats`: episodes of several speakers, each trained one a part of the row."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import ConfigError, CorruptError, InfraError, MeshError, UserError
from meshrl.contract.rows import column_parts, column_posted, parts_column, text_column
from meshrl.contract.types import (
    PARTS,
    POSTED_REWARD,
    GenerateDelta,
    GenerateRequest,
    Outcome,
    PostedReward,
    RowPart,
    Uid,
    Version,
)
from meshrl.rollout.ports import Rollout
from meshrl.rollout.programs import ProgramCache, seats
from meshrl.rollout.programs.seats import Episode
from meshrl.rollout.programs.user import EndedError
from tests.doubles.scripted import END, task

from .chats import chat_tokenizer

UID = Uid("run", "t0", 0)
TOKENIZER = chat_tokenizer()
HERE = "tests.unit.rollout.test_seats_program"


class Speaker:
    """A `Generator` that answers with the number of its request, and of which kind of version it was sampled."""

    def __init__(self, ends: str = "stop") -> None:
        self.version = Version(1, 0)
        self.requests: list[GenerateRequest] = []
        self.ends = ends

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        self.requests.append(request)
        self.version = Version(1, len(self.requests))
        tokens = TOKENIZER.encode(f"{len(self.requests)}{END}")[: request.sampling.max_tokens]
        yield GenerateDelta(
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.full(len(tokens), -float(len(self.requests)), dtype=np.float32),
            version=self.version,
            finish_reason=self.ends if len(tokens) > 1 else "length",
        )


async def two_rounds(episode: Episode) -> dict[str, float]:
    """Every seat speaks twice, in turn, about what the one before it said."""
    said = "go"
    for _ in range(2):
        for name in episode.seats:
            said = await episode.seat(name).say(f"{name}:{said}")
    return {"pro": 1.0, "con": -1.0, "user": 9.0, "rounds": 2.0}


async def forever(episode: Episode) -> dict[str, float]:
    while True:
        await episode.seat("pro").say("more")


async def caught(episode: Episode) -> dict[str, float]:
    pro = episode.seat("pro")
    try:
        await forever(episode)
    except EndedError:
        return {"pro": 0.25, "score": 0.75, pro.finish_reason: 1.0}
    raise AssertionError


async def stranger(episode: Episode) -> None:
    await episode.seat("nobody").say("?")


async def silent(episode: Episode) -> dict[str, float]:
    return {"pro": 1.0}


async def one_reward(episode: Episode) -> dict[str, float]:
    return {"pro": (await two_rounds(episode))["pro"]}


async def no_rewards(episode: Episode) -> float:
    await episode.seat("pro").say("go")
    return 1.0


async def text_reward(episode: Episode) -> dict[str, Any]:
    await episode.seat("pro").say("go")
    return {"pro": "good"}


def waits(episode: Episode) -> None: ...


async def whole(task: Any, uid: Any, engine: Any, tokenizer: Any) -> None: ...


async def run(
    function: Callable[..., Any],
    speakers: Mapping[str, Any],
    *,
    engine: Speaker | None = None,
    max_tokens: int = 200,
    **options: Any,
) -> Rollout:
    given = {"function": f"{HERE}.{function.__name__}", "seats": dict(speakers), **options}
    async with ProgramCache("seats", given) as programs:
        program = await programs.start()
        asked = task(TOKENIZER, max_tokens=max_tokens)
        return await program(asked, UID, engine or Speaker(), TOKENIZER)


def parts_of(rollout: Rollout) -> tuple[RowPart, ...]:
    return column_parts(UID, rollout.columns[PARTS], len(rollout.trajectory.tokens))


async def test_an_episode_is_a_row_with_a_part_for_each_trained_seat() -> None:
    engine = Speaker()
    rollout = await run(
        two_rounds, {"pro": {}, "user": {"trained": False}, "con": {}}, engine=engine
    )
    row, parts = rollout.trajectory, parts_of(rollout)
    assert [part.seat for part in parts] == ["pro", "con"]
    text = TOKENIZER.decode_all
    first, second = row.tokens[: parts[1].start], row.tokens[parts[1].start :]
    assert text(first.tolist()) == (
        f"<|start|>user\npro:go{END}\n<|start|>assistant\n1{END}\n"
        f"<|start|>user\npro:3{END}\n<|start|>assistant\n4{END}"
    )
    assert text(second.tolist()).startswith(f"<|start|>user\ncon:2{END}\n")
    sampled = row.loss_mask.astype(bool)
    assert text(row.tokens[sampled].tolist()) == f"1{END}4{END}3{END}6{END}"
    assert row.rollout_logprobs[sampled].tolist() == [-1, -1, -4, -4, -3, -3, -6, -6]
    assert [(span.version.step, sampled[span.start : span.end].all()) for span in row.spans] == [
        (1, True), (4, True), (3, True), (6, True)
    ]  # fmt: skip
    assert [len(part.anchors) for part in parts] == [2, 2]
    ids = [request.request_id for request in engine.requests]
    assert len(set(ids)) == 6 and all(name.startswith(f"{UID}/") for name in ids)
    assert (rollout.outcome, rollout.finish_reason) == (Outcome.OK, "stop")
    components = {"pro": 1.0, "con": -1.0, "user": 9.0, "rounds": 2.0}
    posted = PostedReward(score=0.0, components=components)
    assert column_posted(rollout.columns[POSTED_REWARD]) == posted
    # What an untrained seat said is kept, for people who read the row.
    assert {"role": "assistant", "content": "2", "name": "user"} in rollout.messages
    assert len(rollout.messages) == 12


async def test_equal_observations_of_a_seat_share_a_name() -> None:
    parts = parts_of(await run(caught, {"pro": {}}, max_tokens=60))
    assert len(parts[0].anchors) == 4 and len(set(parts[0].anchors)) == 1


async def test_a_seat_that_can_say_no_more_ends_the_episode_with_nothing() -> None:
    rollout = await run(forever, {"pro": {}, "con": {}}, max_tokens=70)
    assert (rollout.outcome, rollout.finish_reason) == (Outcome.TRUNCATED, "length")
    assert len(parts_of(rollout)[0].anchors) == 4
    nothing = PostedReward(score=0.0, components={"pro": 0.0, "con": 0.0})
    assert column_posted(rollout.columns[POSTED_REWARD]) == nothing
    assert len(rollout.trajectory.tokens) <= 70


async def test_a_function_may_score_such_an_episode_itself() -> None:
    rollout = await run(caught, {"pro": {}}, max_tokens=20)
    components = {"pro": 0.25, "length": 1.0}
    assert column_posted(rollout.columns[POSTED_REWARD]) == PostedReward(
        score=0.75, components=components
    )


async def test_an_aborted_request_of_any_seat_of_the_policy_cancels_the_row() -> None:
    class Aborts(Speaker):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
            self.ends = "abort" if "/user" in request.request_id else "stop"
            async for delta in super().generate(request):
                yield delta

    speakers = {"pro": {}, "user": {"trained": False}, "con": {}}
    rollout = await run(two_rounds, speakers, engine=Aborts())
    assert (rollout.outcome, rollout.finish_reason) == (Outcome.CANCELLED, "abort")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (stranger, "no seat 'nobody': rollout.program_options.seats has pro, con"),
        (silent, r"silent ended, and neither pro nor con had a turn \(stop\)"),
        (
            one_reward,
            "one_reward returned .'pro': 1.0., without a reward of the trained seat 'con'",
        ),
        (no_rewards, "no_rewards returned 1.0, without a reward of the trained seat 'pro'"),
        (text_reward, "returned .'pro': 'good'., without a reward of the trained seat 'pro'"),
    ],
)
async def test_what_a_function_must_not_do_is_one_line(
    function: Callable[..., Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        await run(function, {"pro": {}, "con": {}})


@pytest.mark.parametrize(
    ("speakers", "said"),
    [
        ({}, "seats: .*at least 1"),
        ({"a": {"trained": False}}, "none is trained"),
        ({"a": {}, "score": {}}, "'score': want letters"),
        ({"a/b": {}}, "'a/b': want letters"),
        ({"a": {}, "b": {"url": "http://localhost:1/v1"}}, "url wants the name of a model"),
        ({"a": {}, "b": {"model": "m"}}, "model is for a seat with a url"),
        ({"a": {}, "b": {"request": {}}}, "request is for a seat with a url"),
        (
            {"a": {}, "b": {"url": "http://x/v1", "model": "m", "trained": True}},
            "trained is for the policy",
        ),
        ({"a": {"api_key": "sk-secret"}}, "api_key"),
    ],
)
def test_wrong_seats_are_refused_before_anything_starts(
    speakers: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        seats.build({"function": f"{HERE}.two_rounds", "seats": speakers})
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("seat", "said"),
    [
        ({"url": "ftp://x/v1"}, "url: 'ftp://x/v1' does not start with"),
        ({"url": "https://me:secret@x/v1"}, "url: it holds a key or a password"),
        ({"url": "https://x/v1?api_key=secret"}, "url: it holds a key or a password"),
        ({"url": "https://x/v1", "key_env": "NOT_SET"}, "key_env: the variable NOT_SET is not set"),
        (
            {"url": "http://far.example/v1", "key_env": "OPPONENT"},
            "the key of seat b would travel to http://far.example unencrypted: use https",
        ),
    ],
)
def test_a_key_does_not_travel_in_plain(
    seat: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPPONENT", "secret")
    options = {"function": f"{HERE}.two_rounds", "seats": {"a": {}, "b": {**seat, "model": "m"}}}
    with pytest.raises(ConfigError, match=said) as caught:
        seats.build(options)
    assert "secret" not in str(caught.value)


def test_a_function_of_another_form_is_refused() -> None:
    for function in ("waits", "whole", "gone"):
        given = {"function": f"{HERE}.{function}", "seats": {"a": {}}}
        with pytest.raises(ConfigError, match=f"(?s)function: .*{function}"):
            seats.build(given)
    here = {"function": f"{Path(__file__)}:gone", "seats": {"a": {}}}
    with pytest.raises(ConfigError, match=r"function: .*gone"):
        seats.check(seats.Config.model_validate(here))


class Server:
    """OpenAI's API, with given answers: texts, statuses, or what is no answer at all."""

    def __init__(self, answers: list[Any], models: int = 404) -> None:
        """`models`: the status of the list of models."""
        self.heard: list[tuple[str, dict[str, Any]]] = []
        told = self.heard

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(models, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told.append((self.headers.get("Authorization", ""), {"path": self.path, **body}))
                answer = answers.pop(0)
                if isinstance(answer, int):
                    return self._say(answer, {"error": {"message": "busy"}})
                if isinstance(answer, str):
                    answer = {"choices": [{"message": {"content": answer}}]}
                return self._say(200, answer)

            def _say(self, status: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @contextmanager
    def serving(self) -> Iterator[str]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self.url
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


async def test_a_seat_of_another_server_hears_its_conversation_and_is_never_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seats, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setenv("OPPONENT", "secret")
    server = Server(["hm", 503, "no"], models=500)
    with server.serving() as url:
        other = {"url": url, "model": "frozen", "key_env": "OPPONENT", "request": {"top_p": 0.5}}
        rollout = await run(two_rounds, {"pro": {}, "con": other})
    assert [part.seat for part in parts_of(rollout)] == ["pro"]
    assert "no" not in TOKENIZER.decode_all(rollout.trajectory.tokens.tolist())
    assert {"role": "assistant", "content": "no", "name": "con"} in rollout.messages
    key, asked = server.heard[-1]
    assert key == "Bearer secret" and len(server.heard) == 3
    assert asked == {
        "path": "/v1/chat/completions",
        "model": "frozen",
        "top_p": 0.5,
        "messages": [
            {"role": "user", "content": "con:1"},
            {"role": "assistant", "content": "hm"},
            {"role": "user", "content": "con:2"},
        ],
    }


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (500, "seat con at http://127.0.0.1:[0-9]+/v1, /chat/completions: .*busy"),
        ({"choices": []}, "seat con at .* answers without a message"),
    ],
)
async def test_a_server_that_fails_is_a_fault_of_the_row(
    answer: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "PAUSES_S", (0.0,))
    with Server([answer, answer]).serving() as url, pytest.raises(InfraError, match=said):
        await run(two_rounds, {"pro": {}, "con": {"url": url, "model": "frozen"}})


async def test_a_server_that_does_not_answer_ends_the_worker_in_one_line() -> None:
    with Server([]).serving() as url:
        pass  # nobody listens there any more
    with pytest.raises(ConfigError, match=r"seats\.con\.url: no seat con at .* answers") as caught:
        await run(two_rounds, {"pro": {}, "con": {"url": url, "model": "frozen"}})
    assert "\n" not in str(caught.value) and isinstance(caught.value, MeshError)
    with (
        Server([], models=401).serving() as url,
        pytest.raises(ConfigError, match=r"seats\.con\.url: seat con at .* asks for a key"),
    ):
        await run(two_rounds, {"pro": {}, "con": {"url": url, "model": "frozen"}})


def test_parts_keep_their_seats_in_the_queue() -> None:
    parts = (RowPart(start=0, anchors=("a",), seat="x"), RowPart(start=3, anchors=(), seat=""))
    assert column_parts(UID, parts_column(parts), 5) == parts
    assert column_parts(UID, text_column("[[0, []]]"), 5) == (RowPart(start=0, anchors=()),)
    for wrong in ('[[0, [], 1]]', '[[0, [], ["x", 2]]]'):  # fmt: skip
        with pytest.raises(CorruptError, match="malformed"):
            column_parts(UID, text_column(wrong), 5)

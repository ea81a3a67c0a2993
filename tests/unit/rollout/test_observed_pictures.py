"""Pictures that an environment, a tool or an agent answers with: in the row's tokens, in order, named by the row."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.rows import row_media_column, trajectory, with_media
from meshrl.contract.types import (
    GenerateDelta,
    GenerateRequest,
    LeasedRow,
    Media,
    Message,
    SamplingParams,
    Task,
    Trajectory,
    Uid,
    Version,
)
from meshrl.http.gateway.models import ChatBody
from meshrl.images import MOST_BYTES, MOST_PIXELS, ImageProcessor, read_image
from meshrl.images.messages import MARK, MOST_OF_ROW, as_openai, content_with, taken_out
from meshrl.rollout.agents import session as agents
from meshrl.rollout.agents.requests import SessionRequest
from meshrl.rollout.conversation import Budget, Conversation
from meshrl.rollout.generation_checkpoint import ResumableGenerator
from meshrl.rollout.ports import Rollout
from meshrl.rollout.programs import tools
from meshrl.rollout.programs.user import Config, Session, SessionProgram
from meshrl.rollout.server_engine.request import _places
from meshrl.rollout.tokenizer import HuggingFaceTokenizer

from ...pictures import PLACEHOLDER, make_tokenizer, picture, write_processor
from ..images.test_images import bomb
from .test_resumable_generator import checkpointer

UID = Uid("run", "t", 0)
A, B, C = picture(0), picture(1, 96, 64), picture(2, 64, 96)
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_processor(path)
    return path


@pytest.fixture(scope="module")
def images(checkpoint: Path) -> ImageProcessor:
    return ImageProcessor(checkpoint)


@pytest.fixture(scope="module")
def tokenizer(images: ImageProcessor) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(make_tokenizer(), images=images)


class Policy:
    """Says the next of `turns` whatever it is asked; a placeholder may be among its words."""

    version = Version(1, 0)

    def __init__(self, tokenizer: HuggingFaceTokenizer, *turns: str) -> None:
        self.requests: list[GenerateRequest] = []
        self._turns = [tokenizer.encode(turn) for turn in turns]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        tokens = self._turns[len(self.requests)]
        self.requests.append(request)
        yield GenerateDelta(
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
            version=self.version,
            finish_reason="stop",
        )


def task(tokenizer: HuggingFaceTokenizer, *media: Media, max_tokens: int = 200) -> Task:
    said = f"{MARK * len(media)} which colour ?"
    messages = [{"role": "user", "content": content_with(said, media) if media else said}]
    parts, found = taken_out(messages)
    ids = tokenizer.encode(tokenizer.render(parts, generation=True))
    return Task(
        run="run",
        task_id="t",
        prompt_ids=tokenizer.with_places(ids, found)[0] if media else np.array(ids, dtype=np.int32),
        messages=(Message(role="user", content=said),),
        sampling=SamplingParams(max_tokens=max_tokens),
        media=media,
    )


def check(images: ImageProcessor, rollout: Rollout, asked: Task, *media: Media) -> Trajectory:
    """The row as the trainer gets it has `media`, each in its places."""
    row = rollout.trajectory
    assert rollout.media == media
    stored = row_media_column(rollout.media, asked.media)
    mine = replace(row, media=asked.media, row_media=codec.unpack_media(stored, names=True))
    (found,) = with_media([mine])
    assert found.media == media
    observed = np.where(row.loss_mask, -1, row.tokens)
    places = images.places(observed, found.media, "row")
    assert (observed == PLACEHOLDER).sum() == sum(count for _, count in places)
    return found


async def test_an_environment_answers_with_pictures_that_the_next_request_has(
    tokenizer: HuggingFaceTokenizer, images: ImageProcessor
) -> None:
    async def play(session: Session) -> None:
        assert await session.reply() == "red"
        await session.say("which colour ?", images=[B.data])
        await session.say(
            f"? {MARK} which {MARK} colour", images=[Image.new("RGB", (64, 64)), A.data]
        )

    asked = task(tokenizer, A)
    # The policy samples a placeholder before pictures are observed: it is no place of theirs.
    policy = Policy(tokenizer, "red <|image_pad|> <|im_end|>", "blue <|im_end|>", "red")
    rollout = await SessionProgram(play, Config(function="x.y"))(asked, UID, policy, tokenizer)
    first, second, third = policy.requests
    assert (first.media, first.media_starts) == ((A,), ())
    assert second.media == (A, B) and third.media[:2] == (A, B) and third.media[3] == A
    starts = [start for start, _ in _places(third, images, "request")]
    assert starts[0] == 3 and tuple(starts[1:]) == third.media_starts
    for start, media in zip(starts, third.media, strict=True):
        count = images.num_tokens(media, "picture")
        own = third.prompt_ids[start - 1 : start + count + 1]
        assert own.tolist() == [5, *[PLACEHOLDER] * count, 6]
    row = check(images, rollout, asked, *third.media)
    assert row.tokens[: len(third.prompt_ids)].tolist() == third.prompt_ids.tolist()
    assert rollout.messages[1]["content"] == f"{MARK}which colour ?"
    # Twice in the row, and stored with the task: the row only names it.
    assert [bool(each.data) for each in row.row_media or ()] == [False, True, True, False]


async def test_a_picture_is_read_once_for_conversation_and_engine_and_not_on_the_event_loop(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[bytes, int]] = []

    def recorded(data: bytes, where: str) -> Image.Image:
        read.append((data, threading.get_ident()))
        return read_image(data, where)

    monkeypatch.setattr("meshrl.images.read_image", recorded)
    images = ImageProcessor(checkpoint)
    tokenizer = HuggingFaceTokenizer(make_tokenizer(), images=images)

    async def play(session: Session) -> None:
        await session.reply()
        await session.say("which colour ?", images=[A.data])
        await session.say("which colour ?", images=[B.data, A.data])

    policy = Policy(tokenizer, *["red <|im_end|>"] * 3)
    await SessionProgram(play, Config(function="x.y"))(task(tokenizer), UID, policy, tokenizer)
    session = agents.AgentSession(
        task(tokenizer), UID, Policy(tokenizer, "red <|im_end|>"), tokenizer
    )
    messages = as_openai((Message(role="user", content=f"{MARK}{MARK} which colour ?"),), (A, C))
    request = SessionRequest(messages=tuple(messages))
    await session.look_at(request)
    await session.ask(request).whole()
    await asyncio.to_thread(images.features, A, "as an engine asks for it")
    assert sorted(data for data, _ in read) == sorted([A.data, B.data, C.data])
    assert threading.get_ident() not in {thread for _, thread in read}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"media_starts": (1, 2, 3)}, "2 pictures begin at"),
        ({"media_starts": (-1,)}, "picture 2 wants 6 places at -1"),
        ({"media_starts": (9,)}, "picture 2 wants 6 places at 9"),
        ({"media_starts": (10**9,)}, "picture 2 wants 6 places at"),
        ({"media": (A, A), "media_starts": (3,)}, "picture 2 begins in the one before it"),
        ({"media": (A, picture(9, 256, 256))}, "picture 2 wants 64 places"),
    ],
)
async def test_wrong_places_are_one_line(
    tokenizer: HuggingFaceTokenizer,
    images: ImageProcessor,
    changes: dict[str, Any],
    problem: str,
) -> None:
    asked = task(tokenizer, A)
    conversation = Conversation(
        UID, tokenizer, asked.prompt_ids, budget=Budget.of(asked), media=asked.media
    )
    await conversation.sample(Policy(tokenizer, "red"), asked.sampling)
    assert conversation.observe([{"role": "user", "content": content_with("?", [B.data])}])
    request = conversation.request(asked.sampling)
    _places(request, images, "request")
    with pytest.raises(UserError, match=problem):
        _places(replace(request, **changes), images, "request")


async def test_what_cannot_be_observed_is_one_line_and_changes_nothing(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    asked = task(tokenizer, max_tokens=30)
    conversation = Conversation(UID, tokenizer, asked.prompt_ids, budget=Budget.of(asked))
    await conversation.sample(Policy(tokenizer, "red"), asked.sampling)
    before = conversation.tokens.tolist()
    broken = b"\x89PNG\r\n\x1a\n" + bytes(40)
    for content, problem in (
        (content_with("?", [broken]), "no picture that can be read"),
        ([{"type": "image", "image": "https://x.y/z.png"}], "pictures are not fetched"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}], "is not base64"),
        ([{"type": "image", "image": 7}], "int, want bytes"),
        ([{"type": "image", "image": A.data}, {"type": "video"}], "part of type 'video'"),
        ("<|image_pad|>", "places for 1 pictures, and the row has 0"),
        (content_with("<|image_pad|>", [A.data]), "places for 2 pictures, and the row has 1"),
    ):
        with pytest.raises(UserError, match=problem):
            conversation.observe([{"role": "user", "content": content}])
    with pytest.raises(UserError, match="1 places <image>, and 2 pictures come"):
        content_with(MARK, [A.data, B.data])
    big = [{"type": "image", "image": picture(n, 60, 60).data} for n in range(3)]
    assert not conversation.observe([{"role": "user", "content": big * 9}])  # no room for an answer
    assert conversation.tokens.tolist() == before and not conversation.media


async def test_the_bytes_of_a_row_are_bounded(
    images: ImageProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.rollout.conversation.MOST_OF_ROW", 2 * len(B.data))
    tokenizer = HuggingFaceTokenizer(make_tokenizer(), images=images)
    asked = task(tokenizer, A)
    conversation = Conversation(
        UID, tokenizer, asked.prompt_ids, budget=Budget.of(asked), media=asked.media
    )
    await conversation.sample(Policy(tokenizer, "red"), asked.sampling)
    for _ in range(3):  # the same picture is stored once
        assert conversation.observe([{"role": "user", "content": content_with("?", [B.data])}])
    with pytest.raises(
        UserError,
        match=r"row run/t/0.0: it observed [\d,]+ bytes of pictures, want 33,554,432 at most: smaller or fewer ones",
    ):
        conversation.observe([{"role": "user", "content": content_with("?", [C.data, A.data])}])
    assert MOST_OF_ROW < 64 << 20 and MOST_PIXELS < 1 << 26


async def test_a_model_of_text_refuses_pictures_in_one_line() -> None:
    text = HuggingFaceTokenizer(make_tokenizer())
    asked = task(text)
    conversation = Conversation(UID, text, asked.prompt_ids, budget=Budget.of(asked))
    await conversation.sample(Policy(text, "red"), asked.sampling)
    with pytest.raises(UserError, match="there are pictures, and the model reads text only"):
        conversation.observe([{"role": "user", "content": content_with("?", [A.data])}])


async def test_tools_return_pictures_and_a_model_of_text_reads_that_there_was_one(
    tokenizer: HuggingFaceTokenizer, images: ImageProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = HuggingFaceTokenizer(make_tokenizer(), images=images)
    monkeypatch.setattr(HuggingFaceTokenizer, "decode_all", lambda *_: said.pop(0))
    text = HuggingFaceTokenizer(make_tokenizer())
    for reader, media in ((reading, (A, B)), (text, ())):
        said = [CALL, "red"]
        asked = task(reader, *media[:1])
        program = tools.build({"tools": [f"{__name__}.look"]})
        rollout = await program(asked, UID, Policy(reader, "red <|im_end|>", "red"), reader)
        await program.aclose()
        observed = rollout.messages[1]
        if media:
            check(images, rollout, asked, *media)
            assert observed["content"] == f"{MARK}which"
        else:
            assert observed["content"] == "[image]\nwhich"


def look() -> list[object]:
    """Look again."""
    return [B.data, "which"]


async def test_an_agent_says_pictures_through_openais_api(
    tokenizer: HuggingFaceTokenizer, images: ImageProcessor
) -> None:
    asked = task(tokenizer, A)
    policy = Policy(tokenizer, "red <|im_end|>", "blue <|im_end|>")
    session = agents.AgentSession(asked, UID, policy, tokenizer)
    messages = as_openai(asked.messages, asked.media)
    for shown in (None, B):
        if shown is not None:
            url = f"data:image/png;base64,{base64.b64encode(shown.data).decode()}"
            parts = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "?"},
            ]
            messages += [{"role": "user", "content": parts}]
        body = ChatBody.model_validate({"messages": messages})
        stream = session.ask(body.ask())
        answer = await stream.whole()
        messages += [{"role": "assistant", "content": answer.text}]
    assert [each.media for each in policy.requests] == [(A,), (A, B)]
    check(images, session.rollout(), asked, A, B)
    assert session.rollout().messages[1]["content"] == f"{MARK}?"
    each = agents.AgentSession(
        asked, UID, policy, tokenizer, agents.SessionRules(branch=agents.Branch.EACH)
    )
    with pytest.raises(UserError, match="branch: each trains text only"):
        each.ask(SessionRequest(messages=tuple(as_openai(asked.messages, asked.media))))


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://169.254.169.254/latest/meta-data", "String should match pattern"),
        ("file:///etc/passwd", "String should match pattern"),
        ("data:text/html;base64,PHNjcmlwdD4=", "String should match pattern"),
        ("data:image/png;base64,!!!!", "picture 1 is not base64"),
        (url_of(SVG, "image/svg+xml"), "no picture that can be read .*want PNG, JPEG"),
        (url_of(b""), "no picture that can be read"),
        (url_of(picture(0).data[:-200]), "picture 1: no picture that can be read"),
        (url_of(bomb(12_000)), "12000 x 12000 pixels, at most"),
        (url_of(bomb(60_000)), "decompression bomb"),
        (url_of(picture(0, 2000, 8).data), "the model cannot read this picture"),
        (url_of(bytes(MOST_BYTES + 1)), f"bytes, at most {MOST_BYTES}"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_a_hostile_picture_of_an_agent_is_one_line_and_no_request(
    tokenizer: HuggingFaceTokenizer, url: str, problem: str
) -> None:
    policy = Policy(tokenizer, "red")
    session = agents.AgentSession(task(tokenizer), UID, policy, tokenizer)
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "high"}}]
    with pytest.raises((UserError, ValidationError), match=problem) as caught:
        messages = [{"role": "user", "content": parts}]
        session.ask(ChatBody.model_validate({"messages": messages}).ask())
    if isinstance(caught.value, UserError):
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert not policy.requests and not session.asked


async def test_a_row_that_observed_a_picture_is_not_continued_from_its_tokens(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    asked = task(tokenizer, A)
    row = LeasedRow(uid=UID, token=1, task=asked, columns={}, delivery=1)
    keeper, policy = checkpointer(), Policy(tokenizer, "red <|im_end|>", "blue", "red")
    engine = ResumableGenerator(policy, keeper, row)
    conversation = Conversation(
        UID, tokenizer, asked.prompt_ids, budget=Budget.of(asked), media=asked.media
    )
    await conversation.sample(engine, asked.sampling)
    assert keeper.keeps(UID)
    assert conversation.observe([{"role": "user", "content": content_with("?", [B.data])}])
    await conversation.sample(engine, asked.sampling)
    assert not keeper.keeps(
        UID
    )  # its first turn stays saved; another worker asks the environment again


def test_a_row_that_names_a_picture_of_nobody_is_said(tokenizer: HuggingFaceTokenizer) -> None:
    tokens = np.array([1], dtype=np.int32)
    columns = {
        "tokens": tokens,
        "loss_mask": tokens.astype(np.uint8),
        "rollout_logprobs": tokens.astype(np.float32),
        "spans": np.zeros((0, 4), dtype=np.int64),
        "row_media": row_media_column([A, B], [A]),
    }
    row = trajectory(UID, columns)
    with pytest.raises(CorruptError, match=rf"row {UID}: its picture {A.sha256[:12]} is not there"):
        with_media([row])
    broken = columns["row_media"].copy()
    broken[-1] ^= 1
    with pytest.raises(CorruptError, match="other data than its name says"):
        trajectory(UID, {**columns, "row_media": broken})

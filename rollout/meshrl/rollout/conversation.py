"""Builds a row of several turns from sampled and observed tokens; no text is tokenised twice.

    prompt │ sampled │ observed │ sampled │ observed │ sampled          tokens, in order
       0   │    1    │    0     │    1    │    0     │    1             loss_mask
           └ spans and log-probs as the engine gave them

A program of several turns is a loop around it:

    conversation = Conversation(uid, tokenizer, task.prompt_ids, budget=Budget.of(task))
    while True:
        turn = await conversation.sample(engine, task.sampling)
        if turn.finish_reason != "stop" or conversation.full:
            break
        if not conversation.observe([{"role": "tool", "content": "42"}]):
            break
    return conversation.rollout()

or, where other code calls the engine, `request`, then `append` with the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from meshrl.common import tracing
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import (
    GenerateRequest,
    Int32,
    Json,
    Media,
    Outcome,
    SamplingParams,
    Task,
    Trajectory,
    Uid,
    VersionSpan,
)
from meshrl.images.messages import MOST_OF_ROW, has_pictures, marked, taken_out, too_many
from meshrl.rollout.ports import Generator, Replaying, Rollout
from meshrl.rollout.streams import Response, sample
from meshrl.rollout.tokenizer import (
    ChatTokenizer,
    Tokenizer,
    look_at,
    picture_tokenizer,
    reads_pictures,
)

OUTCOMES = {"stop": Outcome.OK, "length": Outcome.TRUNCATED, "max_turns": Outcome.TRUNCATED}
"""Row outcome by finish reason; any other reason means that the engine aborted a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a conversation may get."""

    response_tokens: int
    """Tokens after the prompt, observations included."""
    turn_tokens: int | None = None
    """Tokens sampled in one turn; None: as many as are left."""
    turns: int | None = None
    """Turns of the policy; None: any number."""

    @classmethod
    def of(cls, task: Task, *, turn_tokens: int | None = None, turns: int | None = None) -> Budget:
        """A task's `max_tokens` is for all its turns and observations."""
        return cls(response_tokens=task.sampling.max_tokens, turn_tokens=turn_tokens, turns=turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the policy, k tokens."""

    tokens: Int32
    """int32[k]: as sampled, an end-of-turn token included."""
    text: str
    """Decoded, special tokens left out."""
    finish_reason: str
    """`stop`; `length`: the turn's or the conversation's tokens are used up; `abort`: the engine aborted it."""


class Conversation:
    """Tokens of one row in order of time; existing tokens never change.

    Sampled tokens keep the log-probs and versions that the engine gave them (loss mask 1). Observed ones (loss mask
    0, log-prob 0, no version) come from the chat template, which renders new messages only. Two
    turns with nothing observed between them count as one step for step-level estimators (GiGPO).
    """

    def __init__(
        self,
        uid: Uid,
        tokenizer: Tokenizer,
        prompt_ids: Int32,
        *,
        budget: Budget,
        media: tuple[Media, ...] = (),
        seat: str = "",
    ) -> None:
        """Start with a prompt, int32[P], and its pictures; who observes messages needs a ChatTokenizer.

        `seat`: name among several of the row.
        """
        self.uid = uid
        self._first = f"{uid}/{seat}" if seat else str(uid)
        self.media = media
        """Its pictures so far, in order of time."""
        self._starts: tuple[int, ...] = ()
        """First token of each picture after the prompt."""
        self.turns: list[Turn] = []
        self.messages: list[ChatMessage] = []
        """Messages after the prompt: the policy's turns and its observations."""
        self._tokenizer = tokenizer
        self._budget = budget
        self._prompt = len(prompt_ids)
        self._tokens: list[Int32] = [np.asarray(prompt_ids, dtype=np.int32)]
        self._logprobs = [np.zeros(self._prompt, dtype=np.float32)]
        self._mask = [np.zeros(self._prompt, dtype=np.uint8)]
        self._spans: list[VersionSpan] = []
        self.left = budget.response_tokens
        """Tokens that may still be added, sampled or observed."""

    @property
    def tokens(self) -> Int32:
        """int32[T]: all tokens so far, which are the prompt of the next turn."""
        self._tokens = [np.concatenate(self._tokens)]
        return self._tokens[0]

    @property
    def full(self) -> bool:
        """Whether all turns or tokens of the policy are used up."""
        return self.left < 1 or len(self.turns) == self._budget.turns

    def request(self, sampling: SamplingParams) -> GenerateRequest:
        """The request for the next turn: all tokens so far, and as many new ones as fit."""
        most = min(self.left, self._budget.turn_tokens or self.left, sampling.max_tokens)
        # The id of the first request is the uid, by which checkpoints identify a row.
        turn = f"/{len(self.turns)}" if self.turns else ""
        return GenerateRequest(
            request_id=f"{self._first}{turn}",
            prompt_ids=self.tokens,
            sampling=sampling
            if sampling.max_tokens == most
            else replace(sampling, max_tokens=most),
            media=self.media,
            media_starts=self._starts,
        )

    async def sample(self, engine: Generator, sampling: SamplingParams) -> Turn:
        """Sample the policy's next turn and append it."""
        with tracing.span("generate", turn=len(self.turns)) as span:
            response = await sample(engine, self.request(sampling))
            if span is not None:
                versions = dict.fromkeys(str(each.version) for each in response.spans)
                span.attributes |= {
                    "tokens": len(response.tokens),
                    "versions": ", ".join(versions),
                    "finish_reason": response.finish_reason,
                }
        return self.append(response)

    def append(self, response: Response) -> Turn:
        """Append a sampled turn: loss mask 1, log-probs and versions as the engine gave them."""
        start = len(self.tokens)
        self._add(response.tokens, response.logprobs, sampled=True)
        for span in response.spans:
            moved = replace(span, start=span.start + start, end=span.end + start)
            last = self._spans[-1] if self._spans else None
            if last and (last.version, last.end) == (moved.version, moved.start):
                self._spans[-1] = replace(last, end=moved.end)
            else:
                self._spans.append(moved)
        self.turns.append(
            Turn(
                tokens=response.tokens,
                text=self._tokenizer.decode(response.tokens.tolist()),
                finish_reason=response.finish_reason,
            )
        )
        self.messages.append({"role": "assistant", "content": self.turns[-1].text})
        return self.turns[-1]

    def rendered(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The tokens that `messages`, of text, add: from the end of the last turn to the start of the next.

        Raises:
            ConfigError: the tokenizer cannot render messages.
            UserError: its chat template refuses them.
        """
        sampled = bool(self._mask[-1].any())
        last = int(self._tokens[-1][-1]) if sampled else None
        return appended(self._chat_tokenizer, messages, last=last)

    async def look_at(self, messages: Sequence[ChatMessage]) -> None:
        """Have pictures of messages read beside the event loop, before `observe`. Raises as that does."""
        if has_pictures(messages):
            await look_at(self._tokenizer, taken_out(messages)[1])

    def observe(self, messages: Sequence[ChatMessage]) -> bool:
        """Append messages of the environment, which may have pictures (`meshrl.images.messages`).

        See `observe_tokens` for False and `rendered` for errors.
        """
        messages, media = taken_out(messages)
        if not self.observe_tokens(self.rendered(messages), media):
            return False
        self.messages += map(marked, messages)
        return True

    def observe_tokens(self, ids: Sequence[int], media: tuple[Media, ...] = ()) -> bool:
        """Append tokens that the policy did not sample, with one placeholder for each of `media`: loss mask 0.

        Returns False, and appends nothing, if no token would be left for an answer.

        Raises:
            UserError: not as many placeholders as pictures, or pictures that the model cannot read.
        """
        tokens: Int32 = np.array(ids, dtype=np.int32)
        starts: tuple[int, ...] = ()
        if media or reads_pictures(self._tokenizer):
            tokens, starts = picture_tokenizer(self._tokenizer).with_places(ids, media)
        if len(tokens) >= self.left:
            return False
        if media:
            self._add_media(media, starts)
        self._add(tokens, np.zeros(len(tokens), dtype=np.float32), sampled=False)
        return True

    def _add_media(self, media: tuple[Media, ...], starts: Sequence[int]) -> None:
        """Add pictures that begin at `starts` of the next observation. Raises UserError for too many bytes."""
        observed = self.media[len(self.media) - len(self._starts) :]
        sizes = {each.sha256: len(each.data) for each in (*observed, *media)}
        if (size := sum(sizes.values())) > MOST_OF_ROW:
            raise UserError(f"row {self.uid}: it observed {too_many(size)}")
        self._starts += tuple(len(self.tokens) + start for start in starts)
        self.media = (*self.media, *media)

    def observe_text(self, text: str) -> bool:
        """As `observe`, with a text that the chat template does not see."""
        if not self.observe_tokens(self._chat_tokenizer.encode(text)):
            return False
        self.messages.append({"role": "tool", "content": text})
        return True

    def replay(self, engine: Generator) -> bool:
        """Append the recorded observation, if the row continues after another worker; False: there is none."""
        if not isinstance(engine, Replaying):
            return False
        ids = engine.observed(self.tokens).tolist()
        if not ids or not self.observe_tokens(ids):
            return False
        self.messages.append({"role": "tool", "content": self._tokenizer.decode(ids)})
        return True

    def called(self, calls: Sequence[Json]) -> None:
        """Note the tool calls of the last turn, `name` and `arguments` each, for people who read the row."""
        self.messages[-1] = {**self.messages[-1], "tool_calls": list(calls)}

    def rollout(
        self, finish_reason: str | None = None, *, outcome: Outcome | None = None
    ) -> Rollout:
        """The row. Defaults: the last turn's finish reason, `length` if there was none; its outcome (`OUTCOMES`)."""
        reason = finish_reason
        if reason is None:
            reason = self.turns[-1].finish_reason if self.turns else "length"
        tokens = self.tokens
        turn = self.turns[0] if self.turns else None
        if turn is not None and len(turn.tokens) == len(tokens) - self._prompt:
            text = turn.text  # decoded already
        else:
            text = self._tokenizer.decode(tokens[self._prompt :].tolist())
        trajectory = Trajectory(
            uid=self.uid,
            tokens=tokens,
            loss_mask=np.concatenate(self._mask),
            rollout_logprobs=np.concatenate(self._logprobs),
            spans=tuple(self._spans),
            response_text=text,
        )
        ended = OUTCOMES.get(reason, Outcome.CANCELLED) if outcome is None else outcome
        several = len(self.messages) > 1 or any("tool_calls" in each for each in self.messages)
        return Rollout(
            trajectory=trajectory,
            outcome=ended,
            finish_reason=reason,
            messages=tuple(self.messages) if several else (),
            media=self.media,
        )

    @property
    def _chat_tokenizer(self) -> ChatTokenizer:
        if not isinstance(self._tokenizer, ChatTokenizer):
            raise ConfigError("messages need a tokenizer with a chat template")
        return self._tokenizer

    def _add(self, tokens: Int32, logprobs: np.ndarray, *, sampled: bool) -> None:
        if not len(tokens):
            return
        self._tokens.append(np.asarray(tokens, dtype=np.int32))
        self._logprobs.append(np.asarray(logprobs, dtype=np.float32))
        self._mask.append(np.full(len(tokens), sampled, dtype=np.uint8))
        self.left -= len(tokens)


ChatMessage: TypeAlias = Mapping[str, Json]
"""`role`, `content` and other keys that the template reads."""

MARK = "THEASSISTANTSTURNENDSHERE"
"""Stands for the policy's last turn: one word, which no template trims or splits."""
BEGINNING: tuple[ChatMessage, ...] = (
    {"role": "user", "content": "."},
    {"role": "assistant", "content": MARK},
)


def prompt_of(
    tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], *, tools: Sequence[Json] = ()
) -> list[int]:
    """The tokens of a prompt: `messages`, and `tools` (JSON schemas) if the template shows them to the model.

    Raises:
        UserError: there is no chat template, or it refuses the messages.
    """
    return tokenizer.encode(tokenizer.render(messages, tools=tools, generation=True))


def appended(
    tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], *, last: int | None
) -> list[int]:
    """The tokens between the policy's last turn and its next one: end of turn, `messages`, start of the next turn.

    Rendering the whole conversation again would change the past: text that is decoded and encoded again may become
    other tokens than were sampled, and some templates drop the thoughts of earlier turns. So the template renders
    the new messages after a made-up beginning, and only the text after that beginning is used.

    `last` is the last sampled token. If it is the end of the turn, or the policy ended its turn with another special
    token (Llama's `<|eom_id|>`), the template's own end of turn is left out: a turn ends once.

    Raises:
        UserError: there is no chat template, or it refuses the messages.
    """
    ids = tokenizer.encode(_after_turn(tokenizer, messages, generation=True))
    end = tokenizer.encode(_after_turn(tokenizer, (), generation=False))[:1]
    ended = last is not None and bool(ids) and _ends_turn(tokenizer, last, ids[0], end)
    return ids[1:] if ended else ids


def _ends_turn(tokenizer: ChatTokenizer, last: int, first: int, end: Sequence[int]) -> bool:
    """Whether `first`, the template's token after a turn that ended with `last`, would end the turn again."""
    return last == first or (
        list(end) == [first] and tokenizer.is_special(first) and tokenizer.is_special(last)
    )


def _after_turn(
    tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], *, generation: bool
) -> str:
    """The template's text after the policy's turn."""
    whole = tokenizer.render([*BEGINNING, *messages], generation=generation)
    _, mark, tail = whole.partition(MARK)
    if not mark:
        raise UserError("the chat template leaves out the assistant's text")
    return tail

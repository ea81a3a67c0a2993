"""What new messages add to a conversation, in tokens, without touching those that are there.

A chat template renders a whole conversation. Rendering and tokenising it anew at every turn would change the past:
text that is decoded and encoded again may come out as other tokens than were sampled, and some templates drop the
thoughts of earlier turns. So a template is only ever asked about a made-up beginning, and what it says behind that is
kept:

    user: .  assistant: MARK │ <end of turn> tool: 42 <end of turn> assistant:
                              └──────────── encoded and appended ────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.rollout.tokenizer import ChatTokenizer

ChatMessage: TypeAlias = Mapping[str, Json]
"""`role`, `content` and what else the template reads."""

MARK = "THEASSISTANTSTURNENDSHERE"
"""Stands for the policy's last turn: one word, so that no template trims or splits it."""
BEGINNING: tuple[ChatMessage, ...] = (
    {"role": "user", "content": "."},
    {"role": "assistant", "content": MARK},
)


def prompt_of(
    tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], *, tools: Sequence[Json] = ()
) -> list[int]:
    """The tokens of a prompt: `messages`, and `tools` (JSON schemas) where the template tells the model of them.

    Raises:
        UserError: there is no chat template, or it refuses the messages.
    """
    return tokenizer.encode(tokenizer.render(messages, tools=tools, generation=True))


def appended(
    tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], *, last: int | None
) -> list[int]:
    """The tokens between the policy's last turn and its next: the end of the turn, `messages`, where the next begins.

    `last` is the last token that was sampled. Where it is the end of the turn, or the policy ended its turn with
    another special token (Llama's `<|eom_id|>`), the template's own end of turn is left out: a turn ends once.

    Raises:
        UserError: there is no chat template, or it refuses the messages.
    """
    ids = tokenizer.encode(_behind(tokenizer, messages, generation=True))
    end = tokenizer.encode(_behind(tokenizer, (), generation=False))[:1]
    ended = last is not None and bool(ids) and _ends_turn(tokenizer, last, ids[0], end)
    return ids[1:] if ended else ids


def _ends_turn(tokenizer: ChatTokenizer, last: int, first: int, end: Sequence[int]) -> bool:
    """Whether `first`, which the template puts behind a turn that ended in `last`, would end it again."""
    return last == first or (
        list(end) == [first] and tokenizer.is_special(first) and tokenizer.is_special(last)
    )


def _behind(tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], *, generation: bool) -> str:
    """What the template says after the policy's turn."""
    whole = tokenizer.render([*BEGINNING, *messages], generation=generation)
    _, mark, tail = whole.partition(MARK)
    if not mark:
        raise UserError("the chat template leaves out what the assistant said")
    return tail

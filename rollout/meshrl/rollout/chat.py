"""The tokens that new messages add to a conversation; existing tokens are not changed.

A chat template renders a whole conversation. Rendering and tokenising it again at every turn would change the past:
text that is decoded and encoded again may become other tokens than were sampled, and some templates drop the thoughts
of earlier turns. So the template always renders the new messages after a made-up beginning, and only the text after
that beginning is used:

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

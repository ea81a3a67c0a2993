"""Renders a conversation with a checkpoint's chat template, which is an untrusted program.

Jinja's sandbox, in which transformers renders, keeps it from the machine and lets it take all time and memory.
`template_sandbox.py` bounds what a rendering makes; what is too much ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from meshrl.contract.errors import UserError

ENDS_OF_THOUGHT: Final = ("</think>", "<|channel|>analysis")
"""Text of a turn that has thoughts: of Qwen, DeepSeek, GLM and their like, and of gpt-oss."""
_MARK: Final = "thought-0c7f"


def rendered(tokenizer: Any, messages: Iterable[Mapping[str, Any]], **options: Any) -> str:
    """The text of `messages` by the tokenizer's chat template; `options` are those of `apply_chat_template`.

    Raises:
        UserError: the template refuses the messages, or does too much.
    """
    bound_templates()
    conversation = [dict(message) for message in messages]
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))
    except Exception as error:  # a template may raise any error
        roles = ", ".join(str(message.get("role")) for message in conversation[:9])
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template refuses messages of {roles}: {reason}") from error


def drops_thoughts(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> frozenset[str]:
    """The roles before whose messages a chat template leaves out what earlier turns thought: `user`, `tool`.

    Args:
        render: The template's text for messages; it raises UserError for those that it refuses.
    """
    asked: Mapping[str, Any] = {"role": "user", "content": "a"}
    in_text = {"role": "assistant", "content": f"<think>\n{_MARK}\n</think>\n\nb"}
    beside = {"role": "assistant", "content": "b", "reasoning_content": _MARK, "thinking": _MARK}
    turn = beside if _shows(render, [asked, beside]) else in_text
    calls = [
        {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": arguments}}
        for arguments in ({"x": 1}, '{"x": 1}')
    ]
    result = {"role": "tool", "content": "c", "tool_call_id": "call00000"}
    answers: dict[str, list[list[Mapping[str, Any]]]] = {
        "user": [[asked, turn, asked]],
        "tool": [[asked, {**turn, "tool_calls": [call]}, result] for call in calls],
    }
    dropped = set()
    for role, conversations in answers.items():
        shown = [_shows(render, conversation) for conversation in conversations]
        if False in shown and True not in shown:
            dropped.add(role)
    return frozenset(dropped)


def _shows(
    render: Callable[[Sequence[Mapping[str, Any]]], str], messages: Sequence[Mapping[str, Any]]
) -> bool | None:
    """Whether the text of messages has the mark; None where the template refuses them."""
    with suppress(UserError):
        return _MARK in render(messages)
    return None


def bound_templates() -> None:
    """Let transformers, where it is imported, compile chat templates for the bounded sandbox; it has no option."""
    compiling: Any = sys.modules.get("transformers.utils.chat_template_utils")
    if compiling is not None:
        from meshrl.common.template_sandbox import (
            BoundedSandbox,
        )  # Jinja comes with the first template

        compiling.ImmutableSandboxedEnvironment = BoundedSandbox

"""Renders a conversation with a checkpoint's chat template, which is a program that somebody else wrote.

Jinja's sandbox, in which transformers renders, keeps it from the machine and lets it take all time and memory.
`template_sandbox.py` bounds what a rendering makes; what is too much ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from meshrl.contract.errors import UserError


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


def bound_templates() -> None:
    """Let transformers, where it is imported, compile chat templates for the bounded sandbox; it has no option."""
    compiling: Any = sys.modules.get("transformers.utils.chat_template_utils")
    if compiling is not None:
        from meshrl.common.template_sandbox import (
            BoundedSandbox,
        )  # Jinja comes with the first template

        compiling.ImmutableSandboxedEnvironment = BoundedSandbox

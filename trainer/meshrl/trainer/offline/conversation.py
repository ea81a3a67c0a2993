"""A conversation and its answer as the text that a reward model reads, when it learns and when it judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshrl.contract.chat_templates import rendered


def judged_text(messages: Sequence[Mapping[str, str]], answer: str, tokenizer: Any) -> str:
    """The tokenizer's chat template on the whole; without one, the contents with an empty line between them."""
    conversation = [*map(dict, messages), {"role": "assistant", "content": answer}]
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in conversation)
    return rendered(tokenizer, conversation)

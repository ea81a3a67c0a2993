"""A conversation and its answer as the text that a reward model reads, when it learns and when it judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshrl.common.chat_templates import rendered
from meshrl.trainer.data.prompts import beginning
from meshrl.trainer.offline.turn_ends import without_end

NO_PAD = (
    "the tokenizer has no pad_token and no eos_token, and a reward model reads a row at the last token before"
    " padding: name one in tokenizer_config.json"
)


def judged_text(messages: Sequence[Mapping[str, str]], answer: str, tokenizer: Any) -> str:
    """The tokenizer's chat template on the whole, which ends the answer once, also one that has its end already.

    Without a template: what the tokenizer begins a text with (BOS), once, and the contents with an empty line between
    them.
    """
    answer = without_end(answer, tokenizer)
    conversation = [*map(dict, messages), {"role": "assistant", "content": answer}]
    if tokenizer.chat_template:
        return rendered(tokenizer, conversation)
    begin = tokenizer.decode(beginning(tokenizer))
    text = "\n\n".join(message["content"] for message in conversation)
    return text if text.startswith(begin) else begin + text

r"""The end of an assistant's turn, as the chat template writes it: what a policy learns to end its responses with.

    user: .  assistant: MARK │ <|im_end|>\n          the template's tail; a policy samples it up to its end token
    user: .  assistant: MARK │ <|user|>\nNEXT        where nothing stands behind the last turn, the next one begins

Without a chat template the end is the tokenizer's `eos_token`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshrl.common.chat_templates import rendered
from meshrl.contract.errors import UserError
from meshrl.trainer.data.prompts import beginning

MARK = "THEASSISTANTSTURNENDSHERE"
"""Stands for what the assistant says: one word, which no template trims or splits."""
NEXT = "THENEXTTURNSTANDSHERE"


def ended(
    response: str, tokenizer: Any, where: str, variables: Mapping[str, Any] | None = None
) -> str:
    """A response with its end behind it, once: instead of the tokenizer's `eos_token`, too, which it may end with.

    Args:
        response: The assistant's text.
        tokenizer: A tokenizer of transformers.
        where: `file:row`.
        variables: Variables of the chat template.

    Raises:
        UserError: nothing ends a response: there is neither a chat template nor an `eos_token`.
    """
    end = turn_end(tokenizer, variables or {})
    if not end:
        raise UserError(
            f"{where}: nothing ends a response: the tokenizer has no eos_token, and its chat template puts nothing"
            " behind the assistant's text; name one in tokenizer_config.json, or set append_eos=false"
        )
    return without_end(response, tokenizer, variables) + end


def without_end(response: str, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> str:
    """A response without the end that it may have, of the template or of the tokenizer."""
    ends = [turn_end(tokenizer, variables or {}).strip(), tokenizer.eos_token or ""]
    bare = response.rstrip()
    end = next((end for end in ends if end and bare.endswith(end)), "")
    return bare.removesuffix(end) if end else response


def turn_end(tokenizer: Any, variables: Mapping[str, Any]) -> str:
    """The text that ends a turn; "" where nothing does."""
    return _turn_end(tokenizer, str(tokenizer.chat_template or ""), json.dumps(dict(variables)))


def turn_end_id(tokenizer: Any, variables: Mapping[str, Any]) -> int | None:
    """The token that ends a turn; None where none does."""
    ids = tokenizer.encode(turn_end(tokenizer, variables), add_special_tokens=False)
    return ids[-1] if ids and ids[-1] in tokenizer.added_tokens_decoder else None


@functools.lru_cache(maxsize=16)
def _turn_end(tokenizer: Any, template: str, variables: str) -> str:
    own = str(tokenizer.eos_token or "")
    if not template:
        return own
    turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
    options = json.loads(variables)
    try:
        _, mark, tail = rendered(tokenizer, turns, **options).rpartition(MARK)
    except UserError:  # some templates are of prompts alone
        return own
    if not mark:
        return own
    if found := ending(tail, tokenizer):
        return tail[: found[0][1]]
    return tail.rstrip() or next_turn(turns, tokenizer, options) or own


def ending(text: str, tokenizer: Any) -> list[tuple[int, int]]:
    """Beginning and end of each special token at the end of `text`; only white space is between them.

    Of a text that ends with a turn the first one is that of the template, unless what is said ends with others, and
    those behind it end more than the turn (Phi-3 writes an end of the text).
    """
    special, at = special_tokens(tokenizer), len(text)
    found: list[tuple[int, int]] = []
    while True:
        at = len(text[:at].rstrip())
        token = next((token for token in special if text.endswith(token, 0, at)), None)
        if token is None:
            return found[::-1]
        found.append((at - len(token), at))
        at -= len(token)


def next_turn(
    turns: Sequence[Mapping[str, Any]], tokenizer: Any, options: Mapping[str, Any]
) -> str:
    """The special token with which the turn behind `turns` begins, a tool's after calls; "" where it does not."""
    role = "tool" if turns[-1].get("tool_calls") else "user"
    try:
        before = rendered(tokenizer, turns, **options)
        after = rendered(tokenizer, [*turns, {"role": role, "content": NEXT}], **options)
    except UserError:
        return ""
    begin, added, _ = after.removeprefix(before).partition(NEXT)
    return first_token(begin, tokenizer) if added and after.startswith(before) else ""


def first_token(text: str, tokenizer: Any) -> str:
    """The special token with which `text` begins; "" where it begins with none, or with that of a text (BOS)."""
    found = [token for token in special_tokens(tokenizer) if text.startswith(token)]
    return found[0] if found and found[0] != tokenizer.bos_token else ""


@functools.lru_cache(maxsize=16)
def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The texts of the special tokens, the longest first."""
    added = (str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special)
    return tuple(sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True))


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

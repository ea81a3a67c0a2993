"""A small tokenizer with chat templates of the shapes that are about, each with its way to hurt a conversation."""

from __future__ import annotations

import string
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshrl.rollout.tokenizer import HuggingFaceTokenizer

SPECIAL = ["<pad>", "<|end|>", "<|tool_end|>", "<|start|>"]
MERGES = ["th", "nk", "42", "ca", "ll", "user", "tool", "assistant"]

CHATML = (
    "{% if tools %}<|start|>system\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Turns end in a special token."""
FORGETFUL = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content }}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Earlier thoughts are dropped."""
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Turns end in a newline."""
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Knows no tools."""
MUTE = "{% for m in messages %}{{ m.role }}<|end|>{% endfor %}"
"""Leaves out what is said."""


def chat_tokenizer(
    template: str | None = CHATML, variables: Mapping[str, Any] = MappingProxyType({})
) -> HuggingFaceTokenizer:
    """Characters and a few merges, so that text decoded and encoded again is not what was sampled."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [c for c in string.printable if c.isprintable() or c == "\n"]
    words = [*SPECIAL, "<unk>", *MERGES, *characters]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    split = Regex("|".join([*MERGES, r"[\s\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(split, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|tool_end|>", "<|start|>"],
    )
    fast.chat_template = template
    return HuggingFaceTokenizer(fast, variables)

"""A tokenizer as its files describe it, without transformers where that would make the same of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshrl.common.chat_templates import bound_templates
from meshrl.contract.errors import UserError
from meshrl.trainer.data.prompts import PromptTokenizer

AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of `tokenizer_config.json` for which transformers takes the file as it is."""
QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern with which transformers rebuilds a Qwen tokenizer: the file must say the same."""
SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
CHANGES = ("add_prefix_space", "split_special_tokens", "auto_map", "extra_special_tokens", "legacy")
"""Settings that change how a tokenizer encodes, or which one it is."""
ADDS = ("add_bos_token", "add_eos_token")
"""Settings for which transformers makes anew what the file says of tokens around a text."""


def load_prompt_tokenizer(path: Path) -> PromptTokenizer:
    """The tokenizer in `path`. Raises UserError where there is none."""
    try:
        return _from_files(path) or _from_transformers(path)
    except Exception as error:  # files of another form may raise any
        said = str(error).strip().splitlines() or [""]
        raise UserError(
            f"no tokenizer in {path}: {said[0]} ({type(error).__name__}); want the files that the model came with"
        ) from error


def _from_transformers(path: Path) -> PromptTokenizer:
    from transformers import AutoTokenizer

    # Its annotations say more of `encode` than they keep: text gives a list of numbers.
    tokenizer: Any = AutoTokenizer.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    typed: PromptTokenizer = tokenizer
    return typed


def _from_files(path: Path) -> FileTokenizer | None:
    """The tokenizer as its files describe it; None where transformers may make another of them."""
    file, settings_file = path / "tokenizer.json", path / "tokenizer_config.json"
    if not file.is_file() or not settings_file.is_file():
        return None
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    if any(settings.get(change) for change in CHANGES) or "mistral" in _model_type(path):
        return None  # transformers mends the pattern of some Mistral files
    text = file.read_text(encoding="utf-8")
    stored = json.loads(text)
    kind = settings.get("tokenizer_class")
    if kind not in AS_IT_IS and not (kind in QWEN and _is_qwen(stored)):
        return None
    if any((path / name).exists() for name in ("special_tokens_map.json", "added_tokens.json")):
        return None
    added = {token["content"]: token for token in stored.get("added_tokens", ())}
    for token in settings.get("added_tokens_decoder", {}).values():
        same = ("special", "normalized", "lstrip", "rstrip", "single_word")
        held = added.get(token["content"])
        if held is None or any(held[key] != token.get(key, False) for key in same):
            return None
    defaults = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
    stated = {**(defaults if kind in QWEN else {}), **settings}
    special = {name: _content(stated[name]) for name in SPECIAL if stated.get(name)}
    others = map(_content, settings.get("additional_special_tokens") or ())
    # A special token that the file does not have, or has as a word, transformers would add.
    if any(
        token not in added or not added[token]["special"] for token in (*special.values(), *others)
    ):
        return None
    template = settings.get("chat_template")
    beside = path / "chat_template.jinja"
    if beside.is_file():
        template = beside.read_text(encoding="utf-8")
    if (path / "additional_chat_templates").exists() or not isinstance(template, str | None):
        return None
    tokenizer = Tokenizer.from_str(text)
    adds = [settings[name] for name in ADDS if name in settings]
    if any(adds) or (adds and tokenizer.num_special_tokens_to_add(False)):
        return None
    return FileTokenizer(tokenizer, special, template)


def _model_type(path: Path) -> str:
    file = path / "config.json"
    return str(json.loads(file.read_text()).get("model_type", "")) if file.is_file() else ""


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _is_qwen(stored: Mapping[str, Any]) -> bool:
    """True when rebuilding the tokenizer from its vocabulary, as transformers does, changes nothing."""
    model = stored["model"]
    unset = ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
    steps = (stored.get("pre_tokenizer") or {}).get("pretokenizers", ())
    return (
        model.get("type") == "BPE"
        and not any(model.get(name) for name in unset)
        and not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        and stored.get("normalizer") == {"type": "NFC"}
        and len(steps) == 2
        and steps[0].get("pattern") == {"Regex": QWEN_PATTERN}
        and (steps[0].get("behavior"), steps[0].get("invert")) == ("Isolated", False)
        and steps[1].get("type") == "ByteLevel"
        and not steps[1].get("add_prefix_space")
        and not steps[1].get("use_regex")
    )


class FileTokenizer:
    """A tokenizer that is what its files say. Satisfies `PromptTokenizer`."""

    def __init__(
        self, tokenizer: Tokenizer, special: Mapping[str, str], template: str | None
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special = special
        self.chat_template: Any = template
        self.vocab_size = int(tokenizer.get_vocab_size(False))

    def __len__(self) -> int:
        """The number of tokens of the vocabulary."""
        return int(self._tokenizer.get_vocab_size(True))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Their text, special tokens included."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **variables: Any,
    ) -> str:
        """The text of a conversation; `variables` are the template's."""
        # Without the rest of transformers, and without torch.
        from transformers.utils.chat_template_utils import render_jinja_template

        bound_templates()
        assert not tokenize, "prompts are rendered and tokenised apart"
        # Its annotations leave out the special tokens, which a template reads as variables.
        known: dict[str, Any] = {**self._special, "add_generation_prompt": add_generation_prompt}
        rendered: Any = render_jinja_template(
            conversations=[conversation], chat_template=self.chat_template, **(known | variables)
        )
        text: str = rendered[0][0]
        return text

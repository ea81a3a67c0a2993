"""The demo's model: a Qwen3 of 342 thousand parameters over printable characters, as an ordinary checkpoint."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PLAIN = {"model_type": "qwen3"}
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
CHAT_SPECIAL = ("<pad>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_model(
    path: Path,
    *,
    seed: int = 0,
    head_dim: int = 24,
    kind: Mapping[str, Any] = PLAIN,
    tokenizer: Any = None,
) -> None:
    """Write a randomly initialised checkpoint with its tokenizer: config.json, safetensors, tokenizer files.

    vLLM's attention on CPU wants a `head_dim` that is a multiple of 32. `tokenizer` is one of transformers'; None:
    one of single characters. `kind` is `model_type`, as transformers names it, and what that has beside the shape.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tokenizer or _character_tokenizer()
    torch.manual_seed(seed)
    shape: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=288,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    describe: Any = AutoConfig.for_model
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(describe(**shape | dict(kind)))
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)


def chat_tokenizer(words: Sequence[str]) -> Any:
    """Single characters, the parts of a chat as CHAT_TEMPLATE writes it, and each of `words` as one token."""
    return _character_tokenizer(
        CHAT_SPECIAL,
        words,
        eos_token="<|end|>",
        additional_special_tokens=list(CHAT_SPECIAL[3:]),
        chat_template=CHAT_TEMPLATE,
    )


def _character_tokenizer(
    special: Sequence[str] = SPECIAL,
    words: Sequence[str] = (),
    *,
    eos_token: str = "<eos>",
    **options: Any,
) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [c for c in string.printable if c.isprintable()]
    vocabulary = {token: number for number, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    fast: Any = PreTrainedTokenizerFast  # transformers ships no types for it
    return fast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=eos_token,
        unk_token="<unk>",
        **options,
    )

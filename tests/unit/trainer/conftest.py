"""A world of one rank and a tiny checkpoint on disk."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

from meshrl.trainer.model.policy import random_hf

from . import tiny
from .ranks import Ranks


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    random_hf(tiny.config(), seed=0).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="session")
def mixture_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with four experts a layer."""
    path = tmp_path_factory.mktemp("mixture")
    config = Qwen3MoeConfig(
        **tiny.config().to_dict() | {"model_type": "qwen3_moe", "architectures": None},
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
    )  # fmt: skip
    random_hf(config, seed=0).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a character tokenizer: 26 letters, 10 digits, end."""
    path = tmp_path_factory.mktemp("text")
    random_hf(tiny.config(), seed=0).save_pretrained(path)
    alphabet = [*string.ascii_lowercase, *string.digits, "$"]
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(alphabet)}, unk_token="$"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="$").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs programs as several ranks."""
    ranks = Ranks()
    yield ranks
    ranks.close()

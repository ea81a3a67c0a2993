"""Which tokens end a response, by the files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from meshrl.contract.errors import UserError
from meshrl.rollout.end_tokens import eos_token_ids, with_end_of
from meshrl.rollout.engines.torch.architecture import read_architecture
from meshrl.rollout.server_engine.checkpoint import read_checkpoint
from meshrl.rollout.tokenizer import HuggingFaceTokenizer

from .checkpoints import make_model

END = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}]}
PIECES = {"model": {"vocab": [["<unk>", 0.0], ["</s>", 0.0]]}}
WORDS = {"model": {"vocab": {"a": 0, "</s>": 5}}}


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, ()),
        ({"config": {"eos_token_id": None}}, ()),
        ({"config": {"eos_token_id": 3}}, (3,)),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [1, 4]}}, (1, 3, 4)),
        ({"config": {"text_config": {"eos_token_id": 6}}}, (6,)),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "tokenizer": END}, (7,)),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}, "tokenizer": END}, (7,)),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}, "tokenizer": END}, (7,)),
        (
            {
                "tokenizer_config": {
                    "eos_token": "</s>",
                    "added_tokens_decoder": {"2": {"content": "</s>"}},
                },
                "config": {"eos_token_id": 2},
            },
            (2,),
        ),
        ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": PIECES}, (1,)),
        ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": WORDS}, (5,)),
        ({"tokenizer_config": {"eos_token": None}, "tokenizer": END}, ()),
    ],
)
def test_responses_end_at_all_that_the_files_name(
    tmp_path: Path, files: dict[str, Any], ends: tuple[int, ...]
) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert eos_token_ids(tmp_path) == ends


def test_both_kinds_of_engine_end_at_the_end_of_the_tokenizer(tmp_path: Path) -> None:
    model = make_model("Qwen3", eos_token_id=None)
    model.save_pretrained(tmp_path)
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    inner.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.save_pretrained(tmp_path)
    assert read_architecture(tmp_path).eos_token_ids == (2,)
    assert read_checkpoint(tmp_path).eos_token_ids == (2,)


def test_the_tokenizer_of_the_run_counts_where_it_stands_elsewhere() -> None:
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    own = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="b"))
    endless = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner))
    assert with_end_of(own, (2, 5)) == (1, 2, 5)
    assert with_end_of(own, (1,)) == (1,)
    assert with_end_of(endless, (5, 2)) == with_end_of(None, (5, 2)) == (5, 2)


@pytest.mark.parametrize("content", ['{"eos_token_id": "</s>"}', "[]", "{"])
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=str(tmp_path)):
        eos_token_ids(tmp_path)

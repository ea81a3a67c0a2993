"""A prompt has the tokens that transformers gives it, whether transformers is asked or not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from meshrl.cli.demo.tiny_model import write_tiny_model
from meshrl.contract.errors import UserError
from meshrl.trainer.data.prompt_tokenizer import FileTokenizer, load_prompt_tokenizer

TEXTS = (
    "a=1;b=a+2?",
    "  naïve café ☃ e\u0301\n\n\tI'M 3.14!  ",
    "<|im_start|>user\nhi<|im_end|>",
    "<think>x</think>",
    "don't  stop",
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n<|im_start|>{{ message.role }}\n"
    "{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ messages | tojson }}{{ calm }}"
)
CHAT = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "é <&> 1+1?"}]


def qwen(directory: Path, **options: Any) -> Path:
    """A tokenizer of Qwen's kind with a small vocabulary, as transformers saves it."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    merges = [("i", "n"), ("Ġ", "s"), ("o", "n"), ("d", "on")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=merges, bos_token="<|im_start|>", chat_template=TEMPLATE, **options
    )
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(params=["demo", "qwen"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "qwen":
        return qwen(tmp_path)
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("bos_token", "eos_token"))
    return tmp_path


def test_the_tokens_are_those_of_transformers(directory: Path) -> None:
    ours = load_prompt_tokenizer(directory)
    theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert isinstance(ours, FileTokenizer)
    for text in TEXTS:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("setting", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_a_text_begins_with_what_transformers_puts_before_it(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    """The file's own beginning, or the one that transformers makes where the settings say something of it."""
    write_tiny_model(tmp_path)
    file, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    inner = Tokenizer.from_file(str(file))
    inner.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    inner.save(str(file))
    stated = {**json.loads(settings.read_text()), "bos_token": "<unk>", **setting}
    settings.write_text(json.dumps(stated))
    ours = load_prompt_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert isinstance(ours, FileTokenizer) == (not setting)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)


def test_a_chat_is_rendered_as_transformers_renders_it(directory: Path) -> None:
    ours = load_prompt_tokenizer(directory)
    theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    for generation in (True, False):
        options = {"add_generation_prompt": generation, "tokenize": False, "calm": generation}
        rendered = ours.apply_chat_template(CHAT, **options)
        assert rendered == theirs.apply_chat_template(CHAT, **options)
        assert "Be brief." in rendered


@pytest.mark.parametrize(
    "setting",
    [
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"add_prefix_space": True},
        {"pad_token": "<another>"},
        {"chat_template": [{"name": "default", "template": TEMPLATE}]},
        {
            "added_tokens_decoder": {
                "300": {"content": "<new>", "special": True, "normalized": False}
            }
        },
    ],
)
def test_what_transformers_may_change_is_left_to_transformers(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **setting}))
    assert isinstance(load_prompt_tokenizer(tmp_path), PreTrainedTokenizerFast)


def test_a_qwen_file_that_transformers_would_rebuild_otherwise_is_left_to_it(
    tmp_path: Path,
) -> None:
    qwen(tmp_path)
    file = tmp_path / "tokenizer.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "normalizer": {"type": "NFKC"}}))
    assert not isinstance(load_prompt_tokenizer(tmp_path), FileTokenizer)


def test_a_directory_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no tokenizer in {tmp_path}: "):
        load_prompt_tokenizer(tmp_path)


def test_the_feeder_imports_no_torch(tmp_path: Path) -> None:
    qwen(tmp_path)
    code = (
        "import sys, pathlib, meshrl.launcher.services.feeder, meshrl.launcher.prompts\n"
        "import meshrl.launcher.stage_service, meshrl.rpc.queue_connection, meshrl.rpc.runtime\n"
        "import meshrl.trainer.data.feeder, meshrl.trainer.data.prompts\n"
        "from meshrl.trainer.data.prompt_tokenizer import load_prompt_tokenizer\n"
        f"tokenizer = load_prompt_tokenizer(pathlib.Path({str(tmp_path)!r}))\n"
        f"tokenizer.apply_chat_template({CHAT!r}, add_generation_prompt=True, tokenize=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

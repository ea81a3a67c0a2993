"""Fine-tuning on conversations: which tokens are learned, what is refused, and ranks that share a row's tokens."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from meshrl.contract.errors import UserError
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.offline import sft
from meshrl.trainer.offline.config import DpoConfig, SftConfig
from meshrl.trainer.offline.examples import Example, read_examples
from meshrl.trainer.offline.loop import OfflineProgress
from meshrl.trainer.offline.sft import SftLesson
from meshrl.trainer.ranks.world import World

from .ranks import Ranks

ADDED = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}A{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}{{ c.function.arguments.x }}>{% endfor %}$\n"
    "{% else %}{{ m.role[0] | upper }}{{ m.content }}$\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "A{% generation %}{{ m.content }}${% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.role[0] | upper }}{{ m.content }}$\n{% endif %}{% endfor %}"
)
FORGETS = ADDED.replace("{{ m.content or '' }}", "{{ m.content if loop.last else '' }}")
"""Leaves out what earlier turns of the assistant said, as templates do with their thoughts."""
DEEP = "[" * 5000
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "ef"},
    {"role": "assistant", "content": "gh"},
]


@pytest.fixture(scope="module")
def chat_model(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer of single characters and no chat template yet."""
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(text_model, path)
    known = [*string.ascii_lowercase, *"SUTA<>[]\n", "$"]
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(known)}, unk_token="$"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="$").save_pretrained(path)
    return path


def config(path: Path, data: Path, **changes: Any) -> SftConfig:
    fields: dict[str, Any] = {
        "model": {"path": path}, "train_files": [data], "output_dir": data.parent / "out", "device": "cpu"
    }  # fmt: skip
    return SftConfig.model_validate({**fields, **changes})


def write(path: Path, *rows: Mapping[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def templated(model: Path, template: str) -> Path:
    (model / "chat_template.jinja").write_text(template)
    return model


def learned(model: Path, example: Example) -> tuple[str, str]:
    """The whole row, and what of it is learned, turns separated by a bar."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = tokenizer.convert_ids_to_tokens(example.tokens.tolist())
    assert example.mask is not None and example.prompt_length == int(np.argmax(example.mask))
    said = "".join(word if on else "|" for word, on in zip(words, example.mask, strict=True))
    return "".join(words), "|".join(filter(None, said.split("|")))


def one(model: Path, data: Path, **changes: Any) -> Example:
    (example,) = read_examples(config(model, data, **changes), [data], model)
    return example


@pytest.mark.parametrize("template", [ADDED, MARKED])
def test_every_turn_of_the_assistant_is_learned_with_its_end(
    chat_model: Path, tmp_path: Path, template: str
) -> None:
    templated(chat_model, template)
    example = one(chat_model, write(tmp_path / "a.jsonl", {"messages": TALK}))
    assert learned(chat_model, example) == ("Ss$\nUab$\nAcd$\nUef$\nAgh$\n", "cd$|gh$")


def test_tools_calls_and_their_answers_go_through_the_template(
    chat_model: Path, tmp_path: Path
) -> None:
    templated(chat_model, ADDED)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "y"}'}}
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "ab"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "c", "tool_call_id": "1"},
        {"role": "assistant", "content": "d"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (tools, json.dumps(tools)):
        data = write(tmp_path / "a.jsonl", {"messages": talk, "tools": given, "prompt": "other"})
        example = one(chat_model, data)
        assert learned(chat_model, example) == ("[f]Uab$\nA<fy>$\nTc$\nAd$\n", "<fy>$|d$")


def test_variables_of_the_template_count_in_rows_of_both_kinds(
    chat_model: Path, tmp_path: Path
) -> None:
    templated(chat_model, "{% if loud %}S{% endif %}" + ADDED)
    answer = {"prompt": TALK[1:2], "response": "cd"}
    data = write(tmp_path / "a.jsonl", {"messages": TALK[1:3]}, answer)
    made = config(chat_model, data, apply_chat_template_kwargs={"loud": True})
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    rows = [
        tokenizer.convert_ids_to_tokens(e.tokens.tolist())
        for e in read_examples(made, [data], chat_model)
    ]
    assert ["".join(row) for row in rows] == ["SUab$\nAcd$\n", "SUab$\nAcd$"]


def test_a_turn_that_is_written_otherwise_later_is_refused(
    chat_model: Path, tmp_path: Path
) -> None:
    templated(chat_model, FORGETS)
    data = write(tmp_path / "a.jsonl", {"messages": TALK[:3]}, {"messages": TALK})
    with pytest.raises(
        UserError, match=r"a\.jsonl:2: the chat template writes message 2 otherwise"
    ):
        read_examples(config(chat_model, data), [data], chat_model)
    example = one(chat_model, write(data, {"messages": TALK[:3]}))
    assert learned(chat_model, example)[1] == "cd$"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": "ab"}, "'messages' is 'ab', want a list of messages"),
        ({"messages": ["a"]}, "'messages.0' is 'a', want an object"),
        ({"messages": TALK[:2]}, "the assistant says nothing in 'messages'"),
        (
            {"messages": [{"role": "bot", "content": "a"}]},
            "role of 'messages.0' is 'bot', want one",
        ),
        (
            {"messages": [{"from": "human", "value": "a"}]},
            "'messages.0' has 'from', want only role",
        ),
        ({"messages": [{"role": "user", "content": 7}]}, "'messages.0.content' is 7, want text"),
        ({"messages": [{"role": "user"}]}, "'messages.0.content' is null, want text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part of type 'image'"),
        (
            {"messages": [{"role": "assistant", "tool_calls": "f"}]},
            "tool_calls of 'messages.0' are 'f'",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "want a function with its name and arguments as an object",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": DEEP}]}]},
            "want a function with its name and arguments as an object",
        ),
        ({"messages": TALK, "tools": "[f"}, "'tools' is not JSON"),
        ({"messages": TALK, "tools": DEEP}, "'tools' is not JSON"),
        ({"messages": TALK, "tools": [1]}, "'tools' is .1., want a list of function schemas"),
        ({"messages": TALK, "images": ["x.png"]}, "'images' cannot be used"),
        (
            {"messages": [*TALK, {"role": "user", "content": "a" * 90}]},
            r"\d+ tokens > max_length 64",
        ),
    ],
)
def test_a_bad_conversation_is_named_by_file_and_line(
    chat_model: Path, tmp_path: Path, row: Mapping[str, object], said: str
) -> None:
    templated(chat_model, ADDED)
    data = write(tmp_path / "a.jsonl", {"messages": TALK}, row)
    with pytest.raises(UserError, match=rf"a\.jsonl:2: .*{said}"):
        read_examples(config(chat_model, data, max_length=64), [data], chat_model)


def test_without_a_chat_template_a_conversation_is_refused(
    text_model: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "a.jsonl", {"messages": TALK})
    with pytest.raises(UserError, match=r"a\.jsonl:1: .* the tokenizer has no chat template"):
        read_examples(config(text_model, data), [data], text_model)


def test_the_loss_is_that_of_the_learned_tokens_alone(chat_model: Path, tmp_path: Path) -> None:
    templated(chat_model, ADDED)
    rows = [{"messages": TALK}, {"messages": TALK[1:3]}, {"prompt": "ab", "response": "cd"}]
    data = write(tmp_path / "a.jsonl", *rows)
    made = config(chat_model, data)
    examples = read_examples(made, [data], chat_model)
    world = World.start("cpu")
    try:
        policy = build_policy(open_hf(chat_model), world, ModelConfig(path=chat_model))
        lesson = SftLesson(policy, Optimizers(policy, made.optim), made, world, examples, examples)
        found = lesson.step([0, 1, 2], 0.0)["loss"]
    finally:
        world.close()
    assert found == pytest.approx(expected(chat_model, examples), rel=1e-5)


@torch.no_grad()
def expected(model: Path, examples: Sequence[Example]) -> float:
    """Loss by transformers alone: each row by itself, with labels."""
    hf = AutoModelForCausalLM.from_pretrained(model)
    total, count = 0.0, 0
    for example in examples:
        ids = torch.from_numpy(example.tokens).long()
        logprobs = hf(ids[None]).logits[0, :-1].log_softmax(-1)
        of_tokens = logprobs.gather(-1, ids[1:, None])[:, 0]
        mask = torch.arange(len(ids)) >= example.prompt_length
        if example.mask is not None:
            mask = torch.from_numpy(example.mask)
        total -= float(of_tokens[mask[1:]].sum())
        count += int(mask.sum())
    return total / count


def test_conversations_are_learned_to_the_end_turn_by_turn(
    chat_model: Path, tmp_path: Path
) -> None:
    templated(chat_model, ADDED)
    talks = [
        [
            {"role": "user", "content": a}, {"role": "assistant", "content": a + a},
            {"role": "user", "content": b}, {"role": "assistant", "content": b + a},
        ]
        for a in "abcd" for b in "efgh"
    ]  # fmt: skip
    data = write(tmp_path / "a.jsonl", *({"messages": talk} for talk in talks))
    seen: list[OfflineProgress] = []
    optim = {"lr": 2e-2, "weight_decay": 0.0}
    done = sft.run(
        config(
            chat_model, data, val_files=[data], steps=200, batch_rows=8, test_freq=20, optim=optim,
            target_exact_match=0.95, max_tokens_per_pack=64,
        ),
        seen.append,
    )  # fmt: skip
    assert done.exact_match is not None and done.exact_match >= 0.95


def test_two_ranks_that_share_tokens_learn_what_one_learns(
    chat_model: Path, tmp_path: Path, ranks: Ranks
) -> None:
    templated(chat_model, ADDED)
    rows = [{"messages": TALK}, {"messages": TALK[1:3]}, {"prompt": "ab", "response": "cdef"}]
    data = write(tmp_path / "a.jsonl", *rows)
    weights = []
    for sharers in (1, 2):
        model = {"path": chat_model, "ulysses_sequence_parallel_size": sharers}
        made = config(
            chat_model, data, model=model, steps=3, batch_rows=3, val_files=[data],
            output_dir=tmp_path / f"{sharers}", max_tokens_per_pack=40,
        )  # fmt: skip
        settings = made.model_dump(mode="json")
        ranks.run("finetune", settings, output=tmp_path / "output", ranks=sharers)
        weights.append(AutoModelForCausalLM.from_pretrained(made.output_dir).state_dict())
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=2e-5)


def test_pairs_are_not_shared_among_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens of a pair are not shared among ranks; want 1"):
        DpoConfig.model_validate(
            {
                "model": {"path": tmp_path, "ulysses_sequence_parallel_size": 2},
                "train_files": ["a.jsonl"], "output_dir": tmp_path,
            }
        )  # fmt: skip

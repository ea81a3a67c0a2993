"""Learned text of every kind of row under ten published chat templates: prompt, learned part, and its one end.

The learned part stands between « and ».
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from meshrl.contract.errors import UserError
from meshrl.trainer.data.files import FileRow
from meshrl.trainer.offline import dpo, reward_training
from meshrl.trainer.offline.config import DpoConfig, RewardModelConfig, SftConfig
from meshrl.trainer.offline.examples import Example, conversation, tokenised
from meshrl.trainer.offline.pairs import Pair
from meshrl.trainer.offline.turn_ends import turn_end, turn_end_id

from .published_templates import PUBLISHED

Turn = dict[str, Any]
SYSTEM: Turn = {"role": "system", "content": "s"}
USER: Turn = {"role": "user", "content": "x?"}
SAID: Turn = {"role": "assistant", "content": "2"}
THOUGHT: Turn = {**SAID, "reasoning_content": "t"}
CALL: Turn = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}],
}
RESULT: Turn = {"role": "tool", "content": "7"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
SETTINGS: Mapping[str, Any] = {
    "model": {"path": "model"}, "train_files": ["a.jsonl"], "output_dir": "out", "max_length": 9000
}  # fmt: skip

END = {
    "Qwen2.5": "<|im_end|>",
    "Qwen3": "<|im_end|>",
    "Llama-3": "<|eot_id|>",
    "Gemma": "<end_of_turn>",
    "Phi-3": "<|end|>",
    "Mistral": "</s>",
    "DeepSeek-R1": "<｜end▁of▁sentence｜>",
    "GLM-4.5": "<|user|>",  # the next turn begins, and nothing stands before it
    "gpt-oss": "<|return|>",
    "ChatML base": "<|im_end|>",  # the tokenizer's eos_token is <|endoftext|>
}
ASKED = {
    "Qwen2.5": "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\nx?<|im_end|>\n<|im_start|>assistant\n",
    "Qwen3": "<|im_start|>user\nx?<|im_end|>\n<|im_start|>assistant\n",
    "Llama-3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nx?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "Gemma": "<bos><start_of_turn>user\nx?<end_of_turn>\n<start_of_turn>model\n",
    "Phi-3": "<|user|>x?<|end|><|assistant|>",  # its tokens take in the line ends behind them
    "Mistral": "<s>[INST] x?[/INST]",
    "DeepSeek-R1": "<｜begin▁of▁sentence｜><｜User｜>x?<｜Assistant｜><think>\n",
    "GLM-4.5": "[gMASK]<sop><|user|>\nx?<|assistant|>",
    "gpt-oss": "<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>"
    "<|start|>user<|message|>x?<|end|><|start|>assistant",
    "ChatML base": "<|im_start|>user\nx?<|im_end|>\n<|im_start|>assistant\n",
}
"""The prompt of a user's message."""
BEGINS = {
    "Llama-3": "<|begin_of_text|>",
    "Gemma": "<bos>",
    "Mistral": "<s>",
    "DeepSeek-R1": "<｜begin▁of▁sentence｜>",
}
"""How these tokenizers begin a text."""

OPENED = "asks for message"
ALTERNATE = "oles must alternate"
OTHERWISE = "writes message 1 otherwise where the conversation continues"
TURN: dict[str, str] = {
    **{name: f"2{end}" for name, end in END.items()},
    "Qwen3": "<think>\n\n</think>\n\n2<|im_end|>",  # it is asked without, so the model says it
    "Mistral": " 2</s>",
    "GLM-4.5": "\n<think></think>\n2<|user|>",
    "gpt-oss": "<|channel|>final<|message|>2<|return|>",
}
"""Learned text of an assistant's turn in a conversation; refused for R1, whose prompt opens a thought."""
EARLIER = {**TURN, "gpt-oss": "<|channel|>final<|message|>2"}
"""The same of a turn that another one follows: gpt-oss has another end there, which is not learned."""
FIRST = {**{name: f"2{end}" for name, end in END.items()}, "gpt-oss": "2"}
"""The same where nobody asked: from the first word on."""
CALLED = {
    "Qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
    "Llama-3": '{"name": "add", "parameters": {"x": 1}}<|eot_id|>',
    "Mistral": '[TOOL_CALLS] {"name": "add", "arguments": {"x": 1}}</s>',
    "GLM-4.5": "\n<think></think>\n<tool_call>add<arg_key>x</arg_key>\n<arg_value>1</arg_value></tool_call>"
    "<|observation|>",
    "gpt-oss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>',
}
"""Learned text of a tool call."""
REFUSED: dict[str, dict[str, str]] = {
    "DeepSeek-R1": dict.fromkeys(
        ("one", "system", "two", "open", "first", "thought", "tools", "call"), OPENED
    ),
    "Gemma": {
        "system": "System role not supported", "first": ALTERNATE, "tools": ALTERNATE,
        "call": "leaves out the tool calls of message 1",
    },
    "Mistral": {"first": ALTERNATE},
    "Qwen3": {"two": OTHERWISE, "open": OTHERWISE, "tools": OTHERWISE},
    "Phi-3": {"tools": "has no attribute 'content'", "call": "has no attribute 'content'"},
    "ChatML base": {"tools": "has no attribute 'content'", "call": "has no attribute 'content'"},
}  # fmt: skip
"""Rows that a template refuses, or of which its turns cannot be told, and why."""


@functools.cache
def tokenizer_of(name: str) -> Any:
    return PUBLISHED[name].tokenizer()


def text(name: str, example: Example) -> str:
    """The row with what is learned between « and »."""
    tokenizer, said, before = tokenizer_of(name), "", False
    run: list[int] = []
    for token, learned in [*zip(example.tokens.tolist(), example.learned, strict=True), (0, None)]:
        if learned != before:
            part = tokenizer.decode(run)
            said, run = said + (f"«{part}»" if before else part), []
        run, before = [*run, token], learned
    return said


def pair(name: str, prompt: str | Sequence[Turn], response: str) -> str:
    tokens = tokenised(
        prompt, response, tokenizer_of(name), "a.jsonl:3", append_eos=True, max_length=900
    )
    return text(name, tokens)


def talk(name: str, *turns: Turn, tools: Sequence[Any] = ()) -> str:
    row = FileRow("a.jsonl:3", {"messages": list(turns), "tools": list(tools)})
    return text(name, conversation(row, tokenizer_of(name), SftConfig.model_validate(SETTINGS)))


def learned(row: str) -> list[str]:
    return [part.partition("»")[0] for part in row.split("«")[1:]]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_prompt_and_its_response_end_as_the_template_ends_a_turn(name: str) -> None:
    end = END[name]
    assert turn_end(tokenizer_of(name), {}) == end
    assert tokenizer_of(name).decode([turn_end_id(tokenizer_of(name), {})]) == end
    assert pair(name, [USER], "2") == f"{ASKED[name]}«2{end}»"
    assert pair(name, "x?", "2") == f"{BEGINS.get(name, '')}x?«2{end}»"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_text_that_begins_or_ends_with_special_tokens_has_them_once(name: str) -> None:
    end, begin = END[name], BEGINS.get(name, "")
    assert pair(name, f"{begin}x?", "2") == f"{begin}x?«2{end}»"
    own = tokenizer_of(
        name
    ).eos_token  # rows that were ended for another template teach this one's end
    for given in (f"2{end}", f"2{end}\n", f"2{own}"):
        assert pair(name, [USER], given) == f"{ASKED[name]}«2{end}»"
        if name != "DeepSeek-R1":
            assert learned(talk(name, USER, {**SAID, "content": given})) == [TURN[name]]


KINDS: dict[str, tuple[Turn, ...]] = {
    "one": (USER, SAID),
    "system": (SYSTEM, USER, SAID),
    "two": (USER, SAID, USER, SAID),
    "open": (USER, SAID, USER),
    "first": (SAID, USER, SAID),
    "thought": (USER, THOUGHT),
    "tools": (USER, CALL, RESULT, SAID),
    "call": (USER, CALL),
}


def wanted(name: str, kind: str) -> list[str]:
    """Learned texts of the assistant's turns."""
    turn = TURN[name]
    call = CALLED.get(name, "")
    if name == "Qwen3":
        call = "<think>\n\n</think>\n\n" + CALLED["Qwen2.5"]
    thought = {
        "Qwen3": "<think>\nt\n</think>\n\n2<|im_end|>",
        "GLM-4.5": "\n<think>t</think>\n2<|user|>",
        "gpt-oss": "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>",
    }
    return {
        "one": [turn],
        "system": [turn],
        "two": [EARLIER[name], turn],
        "open": [EARLIER[name]],
        "first": [FIRST[name], turn],
        "thought": [thought.get(name, turn)],
        "tools": [call, turn],
        "call": [call],
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_conversation_teaches_the_turns_of_the_assistant_with_their_ends(
    name: str, kind: str
) -> None:
    turns = KINDS[kind]
    tools = TOOLS if kind in ("tools", "call") else ()
    if why := REFUSED.get(name, {}).get(kind):
        with pytest.raises(UserError, match=why) as refused:
            talk(name, *turns, tools=tools)
        assert refused.value.message.startswith("a.jsonl:3: ")
        return
    row = talk(name, *turns, tools=tools)
    assert learned(row) == wanted(name, kind)
    if kind == "one":
        assert row.startswith(f"{ASKED[name]}«")


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_teaches_nothing_is_refused_with_file_and_line(name: str) -> None:
    end = END[name]
    for prompt, response in (("x?", ""), ([USER], " \n"), ([USER], end), ("", "2"), (" ", "2")):
        with pytest.raises(UserError, match=r"^a\.jsonl:3: empty prompt or response"):
            pair(name, prompt, response)
    for prompt in ([USER, SAID], [SAID]):
        with pytest.raises(UserError, match=r"^a\.jsonl:3: the prompt ends with .* the assistant"):
            pair(name, prompt, "2")
    for content in ("", "  ", end):
        with pytest.raises(UserError, match=r"^a\.jsonl:3: 'messages.1' of the assistant is empty"):
            talk(name, USER, {**SAID, "content": content})
    for turns in ([SYSTEM], [USER], [SYSTEM, USER]):
        with pytest.raises(
            UserError, match=r"^a\.jsonl:3: the (assistant says noth|chat template)"
        ):
            talk(name, *turns)


@pytest.mark.parametrize("name", PUBLISHED)
def test_preferences_end_as_the_template_ends_a_turn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, end = tokenizer_of(name), END[name]
    monkeypatch.setattr(dpo.AutoTokenizer, "from_pretrained", lambda *_: tokenizer)
    config = DpoConfig.model_validate(SETTINGS)
    asked = Pair(where="a.jsonl:3", prompt=[USER], chosen="2", rejected=f"3{end}")
    plain = Pair(where="a.jsonl:4", prompt="x?", chosen="2", rejected="3")
    one, other = dpo.comparisons(config, [asked, plain])
    assert text(name, one.chosen) == f"{ASKED[name]}«2{end}»"
    assert text(name, one.rejected) == f"{ASKED[name]}«3{end}»"
    assert text(name, other.chosen) == f"{BEGINS.get(name, '')}x?«2{end}»"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_reward_model_reads_the_conversation_with_one_end_and_one_beginning(name: str) -> None:
    tokenizer, end = tokenizer_of(name), END[name]
    config = RewardModelConfig.model_validate(SETTINGS)

    def read(prompt: str | list[dict[str, str]], chosen: str) -> str:
        pairs = [Pair(where="a.jsonl:3", prompt=prompt, chosen=chosen, rejected="3")]
        ((tokens, _),) = reward_training.conversations(config, pairs, tokenizer)
        said: str = tokenizer.decode(tokens)
        return said

    whole = read([USER], "2")
    assert whole == read("x?", "2") == read([USER], f"2{end}") == read([USER], f"2{end}\n")
    if name != "GLM-4.5":
        assert whole.count(f"2{end}") == 1 and f"{end}{end}" not in whole
    assert whole.startswith(BEGINS.get(name, "")) and whole.count(BEGINS.get(name, "\0")) < 2
    for prompt in ([USER, SAID], ""):
        with pytest.raises(UserError, match=r"^a\.jsonl:3: the prompt (ends with|is empty)"):
            read(prompt, "2")


def test_without_a_template_the_end_is_the_tokenizers() -> None:
    tokenizer = PUBLISHED["Llama-3"].tokenizer()
    tokenizer.chat_template = None

    def row(response: str, append: bool = True) -> str:
        ids = tokenised(
            "x?", response, tokenizer, "a.jsonl:3", append_eos=append, max_length=99
        ).tokens
        said: str = tokenizer.decode(ids)
        return said

    assert row("2") == row("2<|eot_id|>") == "<|begin_of_text|>x?2<|eot_id|>"
    assert row("2", append=False) == "<|begin_of_text|>x?2"
    read = reward_training.conversations(
        RewardModelConfig.model_validate(SETTINGS),
        [Pair(where="a.jsonl:3", prompt="x?", chosen="2", rejected="3<|eot_id|>")],
        tokenizer,
    )
    texts = [tokenizer.decode(tokens) for tokens in read[0]]
    assert texts == ["<|begin_of_text|>x?\n\n2", "<|begin_of_text|>x?\n\n3"]


def test_a_tokenizer_without_an_end_of_its_own_has_that_of_its_template() -> None:
    tokenizer = PUBLISHED["ChatML base"].tokenizer()
    tokenizer.eos_token = None
    row = tokenised("x?", "2", tokenizer, "a.jsonl:3", append_eos=True, max_length=99)
    assert tokenizer.decode(row.tokens) == "x?2<|im_end|>"
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"^a\.jsonl:3: nothing ends a response: .* append_eos=fal"):
        tokenised("x?", "2", tokenizer, "a.jsonl:3", append_eos=True, max_length=99)
    tokenised("x?", "2", tokenizer, "a.jsonl:3", append_eos=False, max_length=99)


def test_special_tokens_with_which_a_call_closes_are_part_of_it() -> None:
    chatml = PUBLISHED["ChatML base"]
    tokenizer = replace(
        chatml, special=(*chatml.special, "<|call_end|>", "<|calls_end|>")
    ).tokenizer()
    tokenizer.chat_template = chatml.template.replace(
        "message['content']",
        "(message['content'] or '') + ('add<|call_end|><|calls_end|>' if message.tool_calls else '')",
    )
    row = FileRow("a.jsonl:3", {"messages": [USER, CALL, RESULT, SAID, USER]})
    example = conversation(row, tokenizer, SftConfig.model_validate(SETTINGS))
    said = tokenizer.decode(example.tokens[example.learned])
    assert said == "add<|call_end|><|calls_end|><|im_end|>2<|im_end|>"
    whole = "".join(f"<|im_start|>{t['role']}\n" for t in row.values["messages"])
    assert tokenizer.decode(example.tokens).count("<|calls_end|>") == 1
    assert tokenizer.decode(example.tokens).count("<|im_end|>\n") == whole.count("\n")


def test_the_marks_of_a_template_count_with_the_line_end_that_they_hold() -> None:
    tokenizer = PUBLISHED["ChatML base"].tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% generation %}{{ m.content + '<|im_end|>\n' }}"
        "{% endgeneration %}{% endfor %}"
    )
    row = FileRow("a.jsonl:3", {"messages": [USER, SAID]})
    example = conversation(row, tokenizer, SftConfig.model_validate(SETTINGS))
    said = "<|im_start|>user\nx?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert tokenizer.decode(example.tokens) == said


def test_an_end_that_is_no_token_is_learned_as_text_without_the_line_end() -> None:
    tokenizer = PUBLISHED["ChatML base"].tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("im_end", "fin")
    assert turn_end(tokenizer, {}) == "<|fin|>" and turn_end_id(tokenizer, {}) is None
    row = FileRow("a.jsonl:3", {"messages": [USER, SAID, USER, SAID]})
    example = conversation(row, tokenizer, SftConfig.model_validate(SETTINGS))
    assert tokenizer.decode(example.tokens[example.learned]) == "2<|fin|>2<|fin|>"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (
            "{% for m in messages %}{{ m.content }}\n{% endfor %}",
            "<|endoftext|>",
        ),  # none of its own
        ("{{ messages[0].content }}", "<|endoftext|>"),  # leaves the assistant out
        ("{{ raise_exception('prompts only') }}", "<|endoftext|>"),
    ],
)
def test_a_template_that_ends_no_turn_leaves_it_to_the_tokenizer(template: str, end: str) -> None:
    tokenizer = PUBLISHED["ChatML base"].tokenizer()
    tokenizer.chat_template = template
    assert turn_end(tokenizer, {}) == end

"""Turns and observations are joined to one row, and nothing that was sampled is ever changed."""

from __future__ import annotations

import numpy as np
import pytest

from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Outcome, SamplingParams, Task, Uid, Version, VersionSpan
from meshrl.rollout.conversation import Budget, Conversation, prompt_of
from meshrl.rollout.streams import Response
from meshrl.rollout.tokenizer import HuggingFaceTokenizer

from .chats import CHATML, FORGETFUL, MUTE, PLAIN, STRICT, chat_tokenizer

UID = Uid("run", "task", 0)
OLD, NEW = Version(1, 3), Version(1, 4)
TOOL = [{"role": "tool", "content": "42"}]


def response(
    tokens: list[int], *versions: Version, reason: str = "stop", logprob: float = -0.25
) -> Response:
    """Tokens by `versions` in equal parts."""
    given = versions or (OLD,)
    size = len(tokens) // len(given)
    ends = [*(size * (i + 1) for i in range(len(given) - 1)), len(tokens)]
    return Response(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.full(len(tokens), logprob, dtype=np.float32),
        spans=tuple(
            VersionSpan(version=v, start=a, end=b)
            for v, a, b in zip(given, [0, *ends], ends, strict=False)
        ),
        finish_reason=reason,
    )


def begun(
    tokenizer: HuggingFaceTokenizer, room: int = 1000, **budget: int
) -> tuple[Conversation, list[int]]:
    prompt = prompt_of(tokenizer, [{"role": "user", "content": "6*7?"}])
    limits = Budget(response_tokens=room, **budget)
    ids = np.array(prompt, dtype=np.int32)
    return Conversation(UID, tokenizer, ids, budget=limits), prompt


def test_a_row_has_everything_in_order_under_its_version() -> None:
    tokenizer = chat_tokenizer()
    conversation, prompt = begun(tokenizer)
    call = tokenizer.encode("call<|end|>")
    answer = tokenizer.encode("so 42<|end|>")
    conversation.append(response(call, OLD))
    assert conversation.observe(TOOL)
    observed = tokenizer.encode("\n<|start|>tool\n42<|end|>\n<|start|>assistant\n")
    conversation.append(response(answer, OLD, NEW, logprob=-0.5))
    rollout = conversation.rollout()
    row = rollout.trajectory
    assert row.tokens.tolist() == [*prompt, *call, *observed, *answer]
    sizes = [len(prompt), len(call), len(observed), len(answer)]
    assert row.loss_mask.tolist() == np.repeat([0, 1, 0, 1], sizes).tolist()
    np.testing.assert_array_equal(
        row.rollout_logprobs, np.repeat(np.float32([0, -0.25, 0, -0.5]), sizes)
    )
    second, half = sum(sizes[:3]), len(answer) // 2
    assert row.spans == (
        VersionSpan(version=OLD, start=len(prompt), end=len(prompt) + len(call)),
        VersionSpan(version=OLD, start=second, end=second + half),
        VersionSpan(version=NEW, start=second + half, end=second + len(answer)),
    )
    assert row.tokens.dtype == np.int32 and row.loss_mask.dtype == np.uint8
    assert row.rollout_logprobs.dtype == np.float32
    assert row.response_text == "call\ntool\n42\nassistant\nso 42"
    assert (rollout.outcome, rollout.finish_reason) == (Outcome.OK, "stop")


@pytest.mark.parametrize("template", [CHATML, FORGETFUL], ids=["chatml", "forgetful"])
def test_sampled_tokens_stay_although_the_template_would_render_them_differently(
    template: str,
) -> None:
    tokenizer = chat_tokenizer(template)
    # Sampled character by character: encoding the text gives other tokens.
    sampled = [tokenizer.encode(c)[0] for c in "<think>th42</think>call"]
    sampled += tokenizer.encode("<|end|>")
    assert tokenizer.encode(tokenizer.decode_all(sampled)) != sampled
    conversation, prompt = begun(tokenizer)
    conversation.append(response(sampled))
    before = conversation.tokens.tolist()
    assert before == [*prompt, *sampled]
    for _ in range(2):
        assert conversation.observe(TOOL)
        assert conversation.tokens[: len(before)].tolist() == before
        conversation.append(response(sampled))
    want = "\n<|start|>tool\n42<|end|>\n<|start|>assistant\n"
    behind = conversation.tokens[len(before) :].tolist()
    assert behind == 2 * [*tokenizer.encode(want), *sampled]


@pytest.mark.parametrize(
    ("template", "said", "between"),
    [
        (CHATML, "call<|end|>", "\n<|start|>tool\n42<|end|>\n<|start|>assistant\n"),
        (CHATML, "call<|tool_end|>", "\n<|start|>tool\n42<|end|>\n<|start|>assistant\n"),
        (CHATML, "call", "<|end|>\n<|start|>tool\n42<|end|>\n<|start|>assistant\n"),
        (PLAIN, "call<|end|>", "\ntool: 42\nassistant: "),
        (PLAIN, "call\n", "tool: 42\nassistant: "),
    ],
    ids=["ended", "ended otherwise", "cut", "ended, no marker", "newline"],
)
def test_an_end_of_turn_is_not_added_twice(template: str, said: str, between: str) -> None:
    tokenizer = chat_tokenizer(template)
    conversation, prompt = begun(tokenizer)
    conversation.append(response(tokenizer.encode(said)))
    assert conversation.observe(TOOL)
    text = tokenizer.decode_all(conversation.tokens.tolist()[len(prompt) :])
    assert text == said + between


def test_variables_of_the_template_count_in_every_turn() -> None:
    template = CHATML + "{% if generated and not thinks %}no thought{% endif %}"
    template = "{% set generated = add_generation_prompt %}" + template
    quiet, loud = (chat_tokenizer(template, {"thinks": thinks}) for thinks in (False, True))
    for messages in ([{"role": "user", "content": "6*7?"}], TOOL):
        said, more = (each.render(messages, generation=True) for each in (loud, quiet))
        assert more == said + "no thought"


def test_a_prompt_shows_tools_if_the_template_does() -> None:
    tokenizer = chat_tokenizer()
    ids = prompt_of(tokenizer, [{"role": "user", "content": "hi"}], tools=[{"name": "add"}])
    assert tokenizer.decode_all(ids).startswith('<|start|>system\n[{"name": "add"}]<|end|>')


def test_an_observation_that_leaves_no_token_for_an_answer_is_not_added() -> None:
    tokenizer = chat_tokenizer()
    call = tokenizer.encode("call<|end|>")
    observed = len(tokenizer.encode("\n<|start|>tool\n42<|end|>\n<|start|>assistant\n"))
    tight, prompt = begun(tokenizer, room=len(call) + observed)
    tight.append(response(call))
    assert not tight.observe(TOOL)
    assert tight.tokens.tolist() == [*prompt, *call]
    assert tight.rollout("length").outcome is Outcome.TRUNCATED
    fits, _ = begun(tokenizer, room=len(call) + observed + 1)
    fits.append(response(call))
    assert fits.observe(TOOL) and fits.left == 1 and not fits.full


def test_a_turn_has_at_most_the_tokens_left_and_its_own_limit() -> None:
    tokenizer = chat_tokenizer()
    conversation, prompt = begun(tokenizer, room=50, turn_tokens=40, turns=2)
    sampling = SamplingParams(max_tokens=1000, temperature=0.5)
    first = conversation.request(sampling)
    assert (first.request_id, first.sampling.max_tokens) == (str(UID), 40)
    assert first.prompt_ids.tolist() == prompt and first.sampling.temperature == 0.5
    conversation.append(response(tokenizer.encode("call<|end|>")))
    assert conversation.observe(TOOL) and not conversation.full
    second = conversation.request(sampling)
    assert second.sampling.max_tokens == conversation.left < 40
    assert second.request_id.startswith(str(UID)) and second.request_id != first.request_id
    conversation.append(response(tokenizer.encode("4"), reason="length"))
    assert conversation.full
    assert conversation.rollout().outcome is Outcome.TRUNCATED


def test_a_task_gives_the_budget() -> None:
    task = Task(
        run="r", task_id="t", prompt_ids=np.arange(3), sampling=SamplingParams(max_tokens=9)
    )
    assert Budget.of(task, turns=2) == Budget(response_tokens=9, turns=2)


def test_a_response_that_the_engine_aborted_is_not_trainable() -> None:
    conversation, _ = begun(chat_tokenizer())
    conversation.append(response([20], reason="abort"))
    assert conversation.rollout().outcome is Outcome.CANCELLED


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "the tokenizer has no chat template"),
        (STRICT, "the chat template refuses messages of user, assistant, tool: no tools here"),
        (MUTE, "the chat template leaves out the assistant's text"),
    ],
)
def test_a_template_that_cannot_render_messages_is_an_error(
    template: str | None, problem: str
) -> None:
    tokenizer = chat_tokenizer(template)
    prompt = np.arange(3, dtype=np.int32)
    conversation = Conversation(UID, tokenizer, prompt, budget=Budget(response_tokens=99))
    conversation.append(response([20]))
    with pytest.raises(UserError, match=problem):
        conversation.observe(TOOL)


def test_messages_need_a_tokenizer_with_a_chat_template() -> None:
    class Words:
        def decode(self, ids: list[int]) -> str:
            return ""

    prompt = np.arange(3, dtype=np.int32)
    conversation = Conversation(UID, Words(), prompt, budget=Budget(response_tokens=9))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="chat template"):
        conversation.observe(TOOL)

"""Sessions: what a client says and hears becomes a row of exactly the tokens that were sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import CapacityError, CorruptError, InfraError, UserError
from meshrl.contract.rows import column_posted, conversation_column, rollout_write, trajectory
from meshrl.contract.types import (
    PARTS,
    POSTED_REWARD,
    Outcome,
    PostedReward,
    SamplingParams,
    Task,
    Trajectory,
    Uid,
    Version,
)
from meshrl.rollout.agents.answer_stream import VisibleText
from meshrl.rollout.agents.requests import (
    ClientToolCall,
    ContextLengthError,
    SessionAnswer,
    SessionEndedError,
    SessionRequest,
)
from meshrl.rollout.agents.session import AgentSession, Branch, SessionRules
from meshrl.rollout.tokenizer import HuggingFaceTokenizer

from ...chat_model import FIRST, SECOND, Scripted, chat_tokenizer

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("talking"))


def task(**sampling: Any) -> Task:
    return Task(
        run="run",
        task_id="t",
        prompt_ids=np.array([5], dtype=np.int32),
        sampling=SamplingParams(**{"max_tokens": 400, **sampling}),
    )


Begin = Callable[..., tuple[Scripted, AgentSession]]


@pytest.fixture
def begin(tokenizer: HuggingFaceTokenizer) -> Begin:
    """An engine that gives these responses, and a session of it."""

    def begun(
        *responses: str | InfraError,
        rules: SessionRules | None = None,
        swap_at: int = 1 << 30,
        **sampling: Any,
    ) -> tuple[Scripted, AgentSession]:
        engine = Scripted(tokenizer, *responses, swap_at=swap_at)
        return engine, AgentSession(task(**sampling), Uid("run", "t", 0), engine, tokenizer, rules)

    return begun


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, *calls: ClientToolCall) -> dict[str, Any]:
    """The message as a client sends it back; arguments as an object, as the gateway passes them."""
    given = [
        {"id": c.id, "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
        for c in calls
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": given} if given else {})}


async def say(session: AgentSession, *messages: Any, **options: Any) -> SessionAnswer:
    return await session.ask(SessionRequest(messages=messages, **options)).whole()


async def write(session: AgentSession, prompt: Any, **options: Any) -> SessionAnswer:
    return await session.ask(SessionRequest(prompt=prompt, **options)).whole()


def row(session: AgentSession) -> Trajectory:
    return session.rollout().trajectory


def check_sampled(row: Trajectory, sampled: Sequence[tuple[list[int], list[float]]]) -> None:
    """The masked tokens and their log-probs are the sampled ones, in order, and nothing else is."""
    mask = row.loss_mask.astype(bool)
    assert row.tokens[mask].tolist() == [token for tokens, _ in sampled for token in tokens]
    expected = [value for _, values in sampled for value in values]
    np.testing.assert_array_equal(row.rollout_logprobs[mask], np.array(expected, dtype=np.float32))
    assert not row.rollout_logprobs[~mask].any()
    spanned = np.zeros(len(row.tokens), dtype=bool)
    for span in row.spans:
        assert not spanned[span.start : span.end].any()
        spanned[span.start : span.end] = True
    assert (spanned == mask).all()


async def test_a_conversation_of_two_turns_is_one_row_of_the_sampled_tokens(
    begin: Begin, tokenizer: HuggingFaceTokenizer
) -> None:
    engine, session = begin("it is", "yes, 3")
    first = await say(session, user("1+2?"))
    second = await say(session, user("1+2?"), assistant(first.text), user("sure?"))
    assert (first.text, second.text, second.finish_reason) == ("it is", "yes, 3", "stop")
    found = row(session)
    check_sampled(found, engine.sampled)
    assert tokenizer.decode_all(found.tokens.tolist()) == (
        "U:1+2?<eos>A:it is<eos>U:sure?<eos>A:yes, 3<eos>"
    )
    # The second request was the row so far, to the token.
    before = len(found.tokens) - len(engine.sampled[1][0])
    assert engine.requests[1].prompt_ids.tolist() == found.tokens[:before].tolist()
    assert second.prompt_tokens == before
    assert session.rollout().outcome is Outcome.OK
    assert session.left_out == 0


async def test_what_was_sampled_is_not_tokenised_again(
    begin: Begin, tokenizer: HuggingFaceTokenizer
) -> None:
    """The policy ends in a token that decodes to nothing: text alone could not bring it back."""
    engine, session = begin("a<pad>b", "c")
    first = await say(session, user("x"))
    assert first.text == "ab"
    await say(session, user("x"), assistant("ab"), user("y"))
    check_sampled(row(session), engine.sampled)
    assert tokenizer.decode_all(row(session).tokens.tolist()).count("<pad>") == 1


async def test_a_row_whose_version_changes_has_a_span_for_each(begin: Begin) -> None:
    engine, session = begin("first answer", "second answer", swap_at=20)
    first = await say(session, user("x"))
    await say(session, user("x"), assistant(first.text), user("y"))
    found = row(session)
    check_sampled(found, engine.sampled)
    assert [span.version for span in found.spans] == [FIRST, SECOND]


async def test_tool_calls_are_recognised_by_their_ids_however_the_client_formats_them(
    begin: Begin, tokenizer: HuggingFaceTokenizer
) -> None:
    engine, session = begin("hm " + CALL, "3")
    first = await say(session, user("1+2?"), tools=(ADD,))
    assert (first.text, first.finish_reason) == ("hm ", "tool_calls")
    (call,) = first.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
    # The content is dropped, and the arguments are in another order.
    back = assistant("", ClientToolCall(id=call.id, name="add", arguments='{"b": 2,   "a": 1}'))
    result = {"role": "tool", "content": "3", "tool_call_id": call.id}
    await say(session, user("1+2?"), back, result, tools=(ADD,))
    found = row(session)
    check_sampled(found, engine.sampled)
    assert tokenizer.decode_all(found.tokens.tolist()) == (
        f"[add]U:1+2?<eos>A:hm {CALL}<eos>T:3<eos>A:3<eos>"
    )
    called = {"name": "add", "arguments": call.arguments}
    assert json.loads(conversation_column(session.rollout().messages).tobytes()) == [
        {"role": "assistant", "content": "hm ", "tool_calls": [called]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]


@pytest.mark.parametrize("named", [0, 1], ids=["at first", "later"])
async def test_a_result_is_the_same_with_the_name_of_its_tool_and_without(
    begin: Begin, named: int
) -> None:
    engine, session = begin(CALL, "3", "yes")
    first = await say(session, user("1+2?"), tools=(ADD,))
    (call,) = first.tool_calls
    result = {"role": "tool", "content": "3", "tool_call_id": call.id}
    results = [result, result]
    results[named] = {**result, "name": "add"}
    asked = (user("1+2?"), assistant("", call))
    second = await say(session, *asked, results[0], tools=(ADD,))
    more = (assistant(second.text), user("sure?"))
    await say(session, *asked, results[1], *more, tools=(ADD,))
    check_sampled(row(session), engine.sampled)
    assert session.left_out == 0


async def test_results_without_ids_are_told_apart_by_their_names(begin: Begin) -> None:
    engine, session = begin("one", "two")
    first = await say(session, user("x"), {"role": "tool", "content": "3", "name": "add"})
    other = {"role": "tool", "content": "3", "name": "sub"}
    await say(session, user("x"), other, assistant(first.text), user("y"))
    check_sampled(row(session), engine.sampled[1:])


SEVERAL = SessionRules(conversations=True)


@pytest.mark.parametrize("branch", Branch)
async def test_the_row_is_the_conversation_that_is_named_and_nothing_of_the_others(
    begin: Begin, branch: Branch
) -> None:
    """Two tries at one task, word for word the same at first, a turn of one after a turn of the other."""
    engine, session = begin(
        "one", "one", "two", "three", "four", rules=replace(SEVERAL, branch=branch)
    )
    for conversation in ("a", "b"):
        await say(session, user("x"), conversation=conversation)
    said = (user("x"), assistant("one"), user("y"))
    await say(session, *said, conversation="a")
    await say(session, *said, conversation="b")
    more = (assistant("three"), user("z"))
    await say(session, *said, *more, conversation="b")
    session.conversation = "a"
    check_sampled(row(session), [engine.sampled[0], engine.sampled[2]])
    assert session.left_out == sum(len(engine.sampled[i][0]) for i in (1, 3, 4))
    session.conversation = "b"
    check_sampled(row(session), [engine.sampled[i] for i in (1, 3, 4)])


async def test_completions_continue_those_of_their_conversation(begin: Begin) -> None:
    engine, session = begin("one", "one", "two", "three", rules=SEVERAL)
    for conversation in ("a", "b"):
        await write(session, "x", conversation=conversation)
    await write(session, "xone y", conversation="a")
    ids = tuple(session.history.turns[1].observed) + tuple(engine.sampled[1][0])
    await write(session, (*ids, 9), conversation="b")
    session.conversation = "a"
    check_sampled(row(session), [engine.sampled[0], engine.sampled[2]])
    session.conversation = "b"
    check_sampled(row(session), [engine.sampled[1], engine.sampled[3]])


async def test_conversations_that_nobody_chose_from_are_no_row(begin: Begin) -> None:
    _engine, session = begin("one", "two", rules=SEVERAL)
    await say(session, user("x"), conversation="a")
    await say(session, user("x"), conversation="b")
    with pytest.raises(InfraError, match="which of 2 conversations is the row"):
        row(session)
    session.conversation = "c"
    with pytest.raises(InfraError, match="gave no answer"):
        row(session)


async def test_names_of_conversations_mean_nothing_where_there_is_one(begin: Begin) -> None:
    """A client that sends a header of its own to every endpoint."""
    engine, session = begin("one", "two")
    await say(session, user("x"), conversation="1")
    await say(session, user("x"), assistant("one"), user("y"), conversation="2")
    check_sampled(row(session), engine.sampled)


async def test_only_the_row_s_conversation_makes_it_too_long(begin: Begin) -> None:
    _engine, session = begin("1", "12345", rules=SEVERAL, max_tokens=20)
    for conversation in ("a", "b"):
        await say(session, user("x"), conversation=conversation)
    with pytest.raises(ContextLengthError):
        longer = user("0123456789abc")
        await say(session, user("x"), assistant("12345"), longer, conversation="b")
    session.conversation = "a"
    assert not session.full
    session.conversation = "b"
    assert "no room for an answer in 20" in session.full


@pytest.mark.parametrize(
    "change",
    [
        lambda call: assistant(
            "", ClientToolCall(id="other", name="add", arguments=call.arguments)
        ),
        lambda call: assistant(
            "", ClientToolCall(id=call.id, name="sub", arguments=call.arguments)
        ),
        lambda call: assistant("", ClientToolCall(id=call.id, name="add", arguments='{"a": 9}')),
        lambda call: assistant("other words", call),
        lambda call: assistant(CALL),
    ],
)
async def test_a_message_that_is_not_the_one_that_was_answered_begins_another_branch(
    begin: Begin, change: Any
) -> None:
    engine, session = begin(CALL, "3")
    first = await say(session, user("1+2?"), tools=(ADD,))
    await say(session, user("1+2?"), change(first.tool_calls[0]), user("go on"), tools=(ADD,))
    found = row(session)
    check_sampled(
        found, engine.sampled[1:]
    )  # nothing of the first response is trained in its place
    assert session.left_out == len(engine.sampled[0][0])


async def test_an_edited_past_is_a_branch_and_the_branch_of_the_last_answer_is_the_row(
    begin: Begin,
) -> None:
    engine, session = begin("one", "two", "edited")
    first = await say(session, user("x"))
    await say(session, user("x"), assistant(first.text), user("y"))
    await say(session, user("x, but better"))
    check_sampled(row(session), engine.sampled[2:])
    assert session.left_out == len(engine.sampled[0][0]) + len(engine.sampled[1][0])


async def test_the_longest_branch_is_the_row_if_the_rules_say_so(begin: Begin) -> None:
    engine, session = begin("one", "two", "sub", rules=SessionRules(branch=Branch.LONGEST))
    first = await say(session, user("x"))
    await say(session, user("x"), assistant(first.text), user("y"))
    await say(session, user("sub-agent"))
    check_sampled(row(session), engine.sampled[:2])


async def test_a_second_branch_is_refused_if_only_one_is_allowed(begin: Begin) -> None:
    engine, session = begin("one", "two", rules=SessionRules(branch=Branch.ONLY))
    await say(session, user("x"))
    with pytest.raises(UserError, match="does not continue the last answer"):
        await say(session, user("y"))
    engine.go.clear()
    session.ask(SessionRequest(messages=(user("x"), assistant("one"), user("z"))))
    with pytest.raises(UserError, match="does not continue the last answer"):
        session.ask(SessionRequest(messages=(user("x"), assistant("one"), user("z"))))
    await session.close("done")
    check_sampled(row(session), engine.sampled)


async def test_two_answers_to_one_conversation_are_siblings(begin: Begin) -> None:
    engine, session = begin("heads", "tails", "so be it")
    both = await asyncio.gather(say(session, user("toss")), say(session, user("toss")))
    assert sorted(answer.text for answer in both) == ["heads", "tails"]
    assert len({request.request_id for request in engine.requests}) == 2
    await say(session, user("toss"), assistant("heads"), user("ok"))
    check_sampled(row(session), [engine.sampled[0], engine.sampled[2]])


async def test_a_template_that_does_not_show_tools_is_refused_for_tools(tmp_path: Path) -> None:
    plain = chat_tokenizer(tmp_path)
    plain._tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    session = AgentSession(task(), Uid("run", "t", 0), Scripted(plain, "x"), plain)
    with pytest.raises(UserError, match="does not show it tools"):
        session.ask(SessionRequest(messages=(user("x"),), tools=(ADD,)))


async def test_a_stop_string_is_sampled_but_not_shown(
    begin: Begin, tokenizer: HuggingFaceTokenizer
) -> None:
    engine, session = begin("Act: look END more", "seen")
    first = await say(session, user("x"), stop=("END",))
    assert (first.text, first.finish_reason) == ("Act: look ", "stop")
    await say(session, user("x"), assistant(first.text), user("y"))
    check_sampled(row(session), engine.sampled)
    assert "END<eos>U:y" in tokenizer.decode_all(row(session).tokens.tolist())


async def test_completions_continue_their_text_and_do_not_repeat_the_stop_string(
    begin: Begin, tokenizer: HuggingFaceTokenizer
) -> None:
    engine, session = begin(" thought Obs: x", "done")
    first = await write(session, "Q:", stop=("Obs:",))
    assert first.text == " thought "
    await write(session, "Q:" + first.text + "Obs: 42.")
    found = row(session)
    check_sampled(found, engine.sampled)
    assert tokenizer.decode_all(found.tokens.tolist()) == "Q: thought Obs: 42.done<eos>"


async def test_completions_in_tokens_continue_their_tokens(begin: Begin) -> None:
    engine, session = begin("ab", "cd", "ef")
    await write(session, (9, 10))
    await write(session, (9, 10, *engine.sampled[0][0], 11))
    check_sampled(row(session), engine.sampled[:2])
    await write(session, (9, 11))
    check_sampled(row(session), engine.sampled[2:])


async def test_a_conversation_too_long_for_an_answer_is_refused_and_its_row_truncated(
    begin: Begin,
) -> None:
    engine, session = begin("12345", "x", max_tokens=20)
    first = await say(session, user("x"), max_tokens=500)
    with pytest.raises(ContextLengthError, match="adds 18: no room for an answer in 20"):
        await say(session, user("x"), assistant(first.text), user("0123456789abc"))
    assert session.full
    check_sampled(row(session), engine.sampled)


async def test_an_answer_is_cut_where_the_row_ends(begin: Begin) -> None:
    _engine, session = begin("0123456789", max_tokens=4)
    answer = await say(session, user("x"), max_tokens=500)
    assert (answer.text, answer.finish_reason) == ("0123", "length")
    assert session.rollout().outcome is Outcome.TRUNCATED


async def test_a_first_prompt_has_its_own_limit(begin: Begin) -> None:
    _, session = begin(rules=SessionRules(prompt_tokens=8))
    with pytest.raises(ContextLengthError, match="the prompt has 9 tokens, and may have 8"):
        session.ask(SessionRequest(messages=(user("1234"),)))


@pytest.mark.parametrize(("client", "wanted"), [(False, (0.7, 0.9)), (True, (0.1, 0.5))])
async def test_the_sampling_is_the_tasks_unless_the_client_may_choose(
    begin: Begin, client: bool, wanted: tuple[float, float]
) -> None:
    engine, session = begin(
        "x", rules=SessionRules(client_sampling=client), temperature=0.7, top_p=0.9, stop=("!",)
    )
    chosen = {"temperature": 0.1, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.1}
    await say(session, user("x"), sampling=chosen, stop=("?", "!"), max_tokens=7)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p) == wanted
    assert (sampling.min_p, sampling.repetition_penalty) == ((0.2, 1.1) if client else (0.0, 1.0))
    assert (sampling.stop, sampling.max_tokens) == (("!", "?"), 7)


async def test_a_bias_is_refused_unless_the_client_may_choose(begin: Begin) -> None:
    biased = {"sampling": {"logit_bias": {5: 1.0}}}
    _, session = begin("x")
    with pytest.raises(UserError, match="logit_bias must be empty") as caught:
        await say(session, user("x"), **biased)
    assert caught.value.details["param"] == "logit_bias"
    engine, session = begin("x", rules=SessionRules(client_sampling=True))
    await say(session, user("x"), **biased)
    assert engine.requests[0].sampling.logit_bias == {5: 1.0}


async def test_a_request_whose_client_disconnects_adds_nothing_to_the_row(begin: Begin) -> None:
    engine, session = begin("never heard", "heard")
    engine.go.clear()
    pending = session.ask(SessionRequest(messages=(user("x"),)))
    await anext(pending)
    await pending.aclose()
    assert engine.aborted == 1
    engine.go.set()
    await say(session, user("x"))
    check_sampled(row(session), engine.sampled[1:])


async def test_closing_aborts_running_requests_and_refuses_new_ones(begin: Begin) -> None:
    engine, session = begin("never heard")
    engine.go.clear()
    pending = session.ask(SessionRequest(messages=(user("x"),)))
    await anext(pending)
    await session.close("it is late")
    with pytest.raises(SessionEndedError, match="it is late"):
        await anext(pending)
    with pytest.raises(SessionEndedError, match="it is late"):
        session.ask(SessionRequest(messages=(user("x"),)))
    assert engine.aborted == 1
    with pytest.raises(InfraError, match="no answer"):
        session.rollout()


async def test_a_fault_of_the_engine_ends_the_session_and_reaches_the_client(begin: Begin) -> None:
    _, session = begin(InfraError("the engine broke"))
    with pytest.raises(InfraError, match="the engine broke"):
        await say(session, user("x"))
    assert str(session.fault.result()) == "the engine broke"


async def test_requests_beyond_the_limits_are_refused(begin: Begin) -> None:
    engine, session = begin("one", "two", rules=SessionRules(concurrent=1, requests=2))
    engine.go.clear()
    first = session.ask(SessionRequest(messages=(user("abcdef"),)))
    with pytest.raises(CapacityError, match="1 requests of this session"):
        session.ask(SessionRequest(messages=(user("x"),)))
    engine.go.set()
    await first.whole()
    await say(session, user("x"))
    with pytest.raises(SessionEndedError, match="had its 2 requests"):
        session.ask(SessionRequest(messages=(user("x"),)))


async def test_a_posted_reward_goes_with_the_row(begin: Begin) -> None:
    _, session = begin("x")
    await say(session, user("x"))
    assert column_posted(session.rollout().columns[POSTED_REWARD]) is None
    session.post(PostedReward(score=1.0))
    reward = PostedReward(score=0.5, components={"steps": 2.0})
    session.post(reward)
    assert column_posted(session.rollout().columns[POSTED_REWARD]) == reward


def shown(tokenizer: HuggingFaceTokenizer, text: str, **options: Any) -> tuple[list[str], Any]:
    visible = VisibleText(tokenizer, **{"stop": (), "tools": False, **options})
    pieces = [visible.feed([token]) for token in tokenizer.encode(text)]
    return pieces, visible.end()


def test_text_that_may_become_a_stop_string_or_a_call_is_not_shown_early(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    pieces, (text, tail, calls) = shown(tokenizer, "a STO b STOP", stop=("STOP",))
    assert (text, tail, calls) == ("a STO b ", "", ())
    assert "".join(pieces) == text
    pieces, (text, tail, calls) = shown(tokenizer, "a <tool b " + CALL, tools=True)
    assert (text, tail, len(calls)) == ("a <tool b ", "", 1)
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{not json}</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        CALL + "<tool_call>{}</tool_call>",
        CALL + " and then",
        '<tool_call>{"name": "add"',
    ],
)
def test_a_call_that_cannot_be_read_is_text(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    pieces, (whole, tail, calls) = shown(tokenizer, "so: " + text, tools=True)
    assert (whole, calls) == ("so: " + text, ())
    assert "".join(pieces) + tail == whole


async def test_every_branch_is_a_part_of_the_row_behind_the_history_that_it_had(
    begin: Begin,
) -> None:
    # An agent that remembers its last answer only, asked about the same sum in its second and third turn.
    engine, session = begin("one", "two", "three", rules=SessionRules(branch=Branch.EACH))
    await say(session, user("1+2?"))
    await say(session, user("you said one"), user("sure?"))
    await say(session, user("you said two"), user("sure?"))
    rollout = session.rollout()
    found = rollout.trajectory
    check_sampled(found, engine.sampled)
    columns = {**rollout_write(found, Outcome.OK, "stop", Version(0, 0)).columns, **rollout.columns}
    parts = trajectory(found.uid, columns).parts
    ends = [*(part.start for part in parts[1:]), len(found.tokens)]
    for part, end, request, (tokens, _) in zip(
        parts, ends, engine.requests, engine.sampled, strict=True
    ):
        assert found.tokens[part.start : end].tolist() == [*request.prompt_ids.tolist(), *tokens]
    (first,), (second,), (third,) = (part.anchors for part in parts)
    assert second == third != first
    assert session.left_out == 0 and len(rollout.messages) == 6


async def test_a_turn_that_branches_share_is_trained_once(begin: Begin) -> None:
    engine, session = begin("one", "two", "three", rules=SessionRules(branch=Branch.EACH))
    first = await say(session, user("1+2?"))
    await say(session, user("1+2?"), assistant(first.text), user("sure?"))
    await say(session, user("1+2?"), assistant(first.text), user("really?"))
    rollout = session.rollout()
    check_sampled(rollout.trajectory, engine.sampled)
    parts = json.loads(bytes(rollout.columns[PARTS]))
    assert [len(anchors) for _, anchors in parts] == [2, 1]
    # The first answer is context in the second part, which holds all that the third request showed.
    part = rollout.trajectory.tokens[parts[1][0] :].tolist()
    shown = engine.requests[2].prompt_ids.tolist()
    assert part == [*shown, *engine.sampled[2][0]]


@pytest.mark.parametrize(
    "text", ["[]", "[[1, []]]", "[[0, []], [9, []]]", "{", "[[0, []], [0, []]]"]
)
def test_parts_that_cannot_be_are_a_corrupt_row(text: str) -> None:
    columns = {
        "tokens": np.zeros(4, dtype=np.int32),
        "loss_mask": np.ones(4, dtype=np.uint8),
        "rollout_logprobs": np.zeros(4, dtype=np.float32),
        "spans": np.zeros((0, 4), dtype=np.int64),
        PARTS: np.frombuffer(text.encode(), dtype=np.uint8),
    }
    with pytest.raises(CorruptError, match="parts"):
        trajectory(Uid("r", "t", 0), columns)

"""Patterns, tool calls, and programs that run in a sandbox."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Outcome, Sample, Score, Uid
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import CompositeJudge, WeightedJudge, build_judge
from meshrl.rewardd.pool.functions import Scorer, combine
from meshrl.rewardd.pool.messages import MAX_TEXT, MAX_TEXTS
from meshrl.rewardd.pool.pool import PoolJudge, _PoolSample, _score
from meshrl.rewardd.pool.rule import FunctionSpec
from meshrl.rewardd.pool.signatures import BadShapeError, FunctionKind, as_compute_score
from meshrl.rewardd.reward_stage import token_ends
from meshrl.rewardd.rewards import code, regex_match, tool_use, visual_format
from meshrl.sandbox.sandbox import no_bubblewrap

HUMANEVAL = os.environ.get("MESHRL_HUMANEVAL", "")
"""The file HumanEval.jsonl.gz of https://github.com/openai/human-eval, which the repository does not hold."""


SEEN, MEANT, NEXT = (f"<{tag}>{tag}</{tag}>" for tag in ("observation", "reasoning", "prediction"))


@pytest.mark.parametrize(
    ("thought", "forms"),
    [
        ("a thought", {"free_think"}),
        (SEEN + MEANT, {"free_think", "grounding"}),
        (MEANT + "\n" + NEXT, {"free_think", "worldmodeling"}),
        (f" {SEEN} {MEANT} {NEXT} ", {"free_think", "grounding_worldmodeling"}),
        (MEANT + SEEN, {"free_think"}),
        (SEEN + SEEN + MEANT, {"free_think"}),
        (f"so: {SEEN}{MEANT}", {"free_think"}),
        ("<observation> </observation>" + MEANT, {"free_think"}),
        (" ", set()),
        (f"{SEEN}{MEANT}</think>", set()),
        ("<observation>" * 20_000, {"free_think"}),
    ],
)
def test_a_visual_form_is_a_thought_of_its_blocks_and_an_answer(
    thought: str, forms: set[str]
) -> None:
    said = f"<think>{thought}</think> <answer>left</answer>"
    for form in visual_format.THOUGHTS:
        config = visual_format.Config(form=form, score=0.5, penalty=-0.5)  # type: ignore[arg-type]
        for text, formed in ((said, form in forms), (f"{said}.", False), (said[:-9], False)):
            score = visual_format.compute_score("", text, None, config=config)
            assert score == (0.5 if formed else -0.5), (form, text)
    empty = f"<think>{thought}</think><answer></answer>"
    assert not any(visual_format.is_formed(empty, form) for form in visual_format.THOUGHTS)


def test_a_ground_truth_that_is_no_pattern_is_named() -> None:
    wrong = regex_match.Config(whole=True, penalty=-1)
    assert regex_match.compute_score("", "xx", "x", config=wrong) == -1.0
    with pytest.raises(UserError, match=r"'\(' is not a regular expression"):
        regex_match.compute_score("", "x", "(")


def response(*calls: str, thought: str = "hm") -> str:
    return f"<think>{thought}</think>\n<tool_call>\n" + "\n".join(calls) + "\n</tool_call>"


CALL = '{"name": "add", "parameters": {"a": 1, "b": 2}}'


@pytest.mark.parametrize(
    ("solution", "truth", "form", "accuracy"),
    [
        (response(CALL), response(CALL), 1, 3),
        (response('{"name": "add", "arguments": {"b": 2, "a": 1}}'), response(CALL), 1, 3),
        # names 1, parameter names 1, values 1 of 2: 3 of 4
        (response('{"name": "add", "parameters": {"a": 1, "b": 9}}'), response(CALL), 1, 1.5),
        # names 1, parameter names 1/2, values 1: 2.5 of 4
        (response('{"name": "add", "parameters": {"a": 1}}'), response(CALL), 1, 0.75),
        (response('{"name": "sub", "parameters": {"a": 1, "b": 2}}'), response(CALL), 1, -3),
        (response("no call"), response(CALL), 1, -3),
        (CALL, response(CALL), 0, -3),
        ("<tool_call>\n" + CALL + "\n</tool_call>", response(CALL), 0, 3),
        (response(CALL) + " more", response(CALL), 0, 3),
        ("<think>a</think><response>b</response>", "<think>x</think><response>y</response>", 1, 0),
        (response(CALL), "<think>x</think><response>y</response>", 0, 0),
    ],
)
def test_tool_calls_earn_for_their_form_and_for_what_agrees(
    solution: str, truth: str, form: float, accuracy: float
) -> None:
    assert tool_use.compute_score("", solution, truth) == {
        "score": pytest.approx(form + accuracy),
        "format_score": form,
        "accuracy_score": pytest.approx(accuracy),
    }


def test_each_call_is_paired_once() -> None:
    twice = tool_use.agreement([("f", {"a": 1})] * 2, [("f", {"a": 1})])
    assert twice == pytest.approx((0.5 + 2) / 3)
    assert (
        tool_use.agreement([("f", {"a": 2}), ("f", {"a": 1})], [("f", {"a": 1}), ("f", {"a": 2})])
        == 1.0
    )


def test_programs_run_in_a_sandbox_only() -> None:
    with pytest.raises(ConfigError, match=r"set reward\.recipe_sandbox: strict"):
        code.compute_score("apps", "print(1)", {"inputs": [""], "outputs": ["1"]})


@pytest.fixture
async def judge() -> AsyncIterator[PoolJudge]:
    if (why := no_bubblewrap()) is not None:
        pytest.skip(why)
    functions = [{"name": "code", "kwargs": {"test_deadline_s": 2}}]
    built = build_judge(
        RewardConfig.model_validate(
            {"functions": functions, "recipe_sandbox": "strict", "workers": 2}
        )
    )
    yield built
    await built.close()


async def run(judge: Any, *pairs: tuple[str, Any], source: str = "") -> list[Score]:
    samples = [
        Sample(
            uid=Uid("r", "t", n),
            data_source=source,
            solution=text,
            ground_truth=truth,
            extra_info={},
        )
        for n, (text, truth) in enumerate(pairs)
    ]
    return list(await judge.score(samples))


SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
READ = "a, b = map(int, input().split())\n"


async def test_programs_are_scored_by_the_share_of_their_tests(judge: PoolJudge) -> None:
    fn = json.dumps({"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"], "fn_name": "add"})
    asserts = {"asserts": ["assert add(1, 2) == 3", "assert add(0, 0) == 1"]}
    add = "def add(a, b):\n    print('noise')\n    return a + b"
    scores = await run(
        judge,
        (f"Here:\n```python\n{READ}print(a + b)\n```\nDone.", SUM),
        (f"{READ}print(3)", SUM),
        (add, fn),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", fn),
        (add, asserts),
        ("print('x'", SUM),
    )
    assert [(s.outcome, s.reason) for s in scores[:5]] == [(Outcome.OK, "")] * 5
    assert [s.score for s in scores] == [1.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    assert scores[5].outcome is Outcome.POLICY_FAULT
    assert scores[1].components == {"code": 0.5, "passed": 1.0, "tests": 2.0}


HOSTILE = {
    "loops": "while True: pass",
    "leaves as if well": "import os; os._exit(0)",
    "kills its judge": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kills everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "forks": "import os\nwhile True: os.fork()",
    "prints without end": "while True: print('x' * 65536)",
    "memory": "x = bytearray(8 << 30)",
    "reads its judge": "import os\nprint(open(f'/proc/{os.getppid()}/mem', 'rb').read(1))",
    "network": "import socket; socket.socket()",
}


async def test_a_hostile_program_only_fails_its_tests(judge: PoolJudge) -> None:
    good = (f"{READ}print(a + b)", SUM)
    one = {"inputs": ["1 2"], "outputs": ["3"]}
    pairs = [pair for text in HOSTILE.values() for pair in ((text, one), good)]
    scores = await run(judge, *pairs)
    assert [(s.outcome, s.score, s.reason) for s in scores] == [
        (Outcome.POLICY_FAULT, 0.0, ""),
        (Outcome.OK, 1.0, ""),
    ] * len(HOSTILE)


async def test_a_truth_without_tests_is_a_fault_of_the_data(judge: PoolJudge) -> None:
    scores = await run(
        judge, ("x", {"answer": 1}), ("x", "nothing"), ("x", {"inputs": [], "outputs": []})
    )
    assert [s.outcome for s in scores] == [Outcome.INFRA_FAULT] * 3
    assert "neither test, asserts nor inputs and outputs (it has answer)" in scores[0].reason
    assert "the ground truth is not JSON" in scores[1].reason
    assert "has no tests" in scores[2].reason


def humaneval(count: int) -> list[Any]:
    lines = gzip.decompress(Path(HUMANEVAL).read_bytes()).splitlines()
    return [json.loads(line) for line in lines[:count]]


@pytest.mark.skipif(not HUMANEVAL, reason="MESHRL_HUMANEVAL names no HumanEval.jsonl.gz")
async def test_solutions_of_humaneval_pass_and_wrong_ones_do_not(judge: PoolJudge) -> None:
    problems = humaneval(8)
    right = [(p["canonical_solution"], p) for p in problems]
    complete = [(f"```python\n{p['prompt']}{p['canonical_solution']}```", p) for p in problems]
    wrong = [("    return None\n", p) for p in problems]
    scores = await run(judge, *right, *complete, *wrong)
    assert [s.score for s in scores] == [1.0] * 16 + [0.0] * 8


async def test_the_table_of_verl_runs_programs_in_a_sandbox() -> None:
    if (why := no_bubblewrap()) is not None:
        pytest.skip(why)
    judge = build_judge(RewardConfig.model_validate({"recipe_sandbox": "strict"}))
    try:
        (score,) = await run(judge, (f"{READ}print(a + b)", json.dumps(SUM)), source="taco")
    finally:
        await judge.close()
    assert (score.outcome, score.score) == (Outcome.OK, 1.0)


TEXT = "2 + 2 = 4\n\nso 4\n+ 1 = 5\n \n#### 5"
ENDS = [1, 9, 11, 15, 23, 26, len(TEXT)]
"""Ends of the tokens; the paragraphs of TEXT end at 9, 23 and at the end."""


def steps(result: Any, text: str = TEXT, ends: Sequence[int] = ENDS) -> dict[str, Any]:
    call = as_compute_score(FunctionKind.PROCESS, lambda **arguments: result)
    return call(  # type: ignore[no-any-return]
        data_source="", solution_str=text, ground_truth="", extra_info={"token_ends": list(ends)}
    )


def test_steps_are_paragraphs_by_default() -> None:
    assert steps([1, 0.5, -2])["token_rewards"] == [0, 1, 0, 0, 0.5, 0, -2]


def test_steps_end_where_a_function_says_and_may_share_a_token() -> None:
    found = steps([(8, 1.0), (9, 0.5), (10_000, 2.0)])
    assert (found["score"], found["token_rewards"]) == (3.5, [0, 1.5, 0, 0, 0, 0, 2])


def test_no_token_and_no_step_are_no_reward() -> None:
    assert steps([], text="", ends=[])["token_rewards"] == []
    assert steps([(0, 1.0)], text="", ends=[])["token_rewards"] == []


@pytest.mark.parametrize("result", [[1, 2], [(9, 1), 2, 3]])
def test_steps_that_fit_no_paragraph_are_named(result: list[Any]) -> None:
    with pytest.raises(BadShapeError, match="steps for a response of 3 paragraphs"):
        steps(result)


def test_ends_of_tokens_count_characters_and_special_tokens_are_none(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE(vocab={"a": 0, "Ã": 1, "©": 2, "b": 3}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokens = np.array([0, 1, 2, 3, 4], dtype=np.int32)
    assert inner.decode(tokens.tolist()) == "aéb"
    assert token_ends(tmp_path)(tokens) == [1, 1, 2, 3, 3]
    with pytest.raises(ConfigError, match=r"needs .*tokenizer\.json, which does not exist"):
        token_ends(tmp_path / "nowhere")


def scorer(name: str, weight: float, gate: float | None = None) -> Scorer:
    spec = FunctionSpec(component=name, weight=weight, kwargs={}, name=name, digest="0", gate=gate)
    return Scorer(spec=spec, call=print, arguments={})


def test_a_function_without_token_rewards_joins_the_others_at_the_last_token() -> None:
    scorers = (scorer("a", 2), scorer("b", 1), scorer("c", 3))
    tokens = {"score": 6.0, "token_rewards": [1, 2, 3]}
    found = combine(scorers, [tokens, tokens, 10.0], 3)
    assert (found["score"], found["token_rewards"]) == (48.0, [3, 6, 39])
    gated = combine((scorer("gate", 1, gate=0.5), *scorers), [0.0, tokens, tokens, 10.0], 3)
    assert gated["score"] == 0.0 and "token_rewards" not in gated


def test_texts_of_functions_and_judges_are_kept_and_bounded() -> None:
    said = {"score": 1.0, "pred": "42", "outcome": "ok", "why": "x" * 9999, "bad\nname": "y"}
    alone = combine((scorer("a", 1),), [said])["texts"]
    assert {name: len(text) for name, text in alone.items()} == {"pred": 2, "why": MAX_TEXT}
    both = combine((scorer("a", 1), scorer("b", 1)), [said, 2.0])
    assert set(both["texts"]) == {"a.pred", "a.why"}
    many = {"score": 0.0, **{f"t{n}": "z" for n in range(99)}}
    assert len(combine((scorer("a", 1),), [many])["texts"]) == MAX_TEXTS
    assert "texts" not in combine((scorer("a", 1),), [1.0])


@pytest.mark.parametrize(
    "texts", [["a"], {"a": 1}, {"a": "x" * (MAX_TEXT + 1)}, {"bad\nname": "x"}]
)
async def test_texts_that_our_code_does_not_send_are_no_score(texts: object) -> None:
    row = Sample(
        uid=Uid("r", "t", 0), data_source="", solution="", ground_truth=None, extra_info={}
    )
    message = {"score": 1.0, "components": {}, "texts": texts}
    item = _PoolSample(number=0, uid=row.uid, done=asyncio.Future())
    assert _score(message, item, "h") is None


class Fixed:
    """A judge that always gives the same score."""

    reward_hash = "fixed"

    def __init__(self, score: float, *token_rewards: float) -> None:
        self._score, self._tokens = score, token_rewards

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        tokens = self._tokens or None
        return [
            Score(uid=s.uid, outcome=Outcome.OK, score=self._score, token_rewards=tokens)
            for s in samples
        ]


async def test_judges_add_up_per_token_as_functions_do() -> None:
    def parts(*judges: Fixed, gate: float | None = None) -> CompositeJudge:
        parts = [
            WeightedJudge(label=str(n), judge=judge, weight=2.0) for n, judge in enumerate(judges)
        ]
        parts[0] = WeightedJudge(label="0", judge=judges[0], weight=2.0, gate=gate)
        return CompositeJudge(parts, "h")

    row = Sample(
        uid=Uid("r", "t", 0), data_source="", solution="", ground_truth=None, extra_info={}
    )
    several = (Fixed(5.0), Fixed(3.0, 1.0, 2.0), Fixed(0.0, 1.0, 1.0))
    (together,) = await parts(*several).score([row])
    assert (together.score, together.token_rewards) == (16.0, (4.0, 16.0))
    (gated,) = await parts(*several, gate=6.0).score([row])
    assert (gated.score, gated.token_rewards) == (10.0, None)
    (apart,) = await parts(Fixed(1.0, 1.0), Fixed(1.0, 1.0, 2.0)).score([row])
    assert (apart.outcome, apart.reason) == (
        Outcome.INFRA_FAULT,
        "1: 2 token_rewards, others 1",
    )

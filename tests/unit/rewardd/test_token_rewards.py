"""Rewards of tokens: steps of text find their tokens, functions and judges add up, gates take precedence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Outcome, Sample, Score, Uid
from meshrl.rewardd.judge import CompositeJudge, WeightedJudge
from meshrl.rewardd.pool.functions import Scorer, combine
from meshrl.rewardd.pool.messages import MAX_TEXT, MAX_TEXTS
from meshrl.rewardd.pool.pool import _PoolSample, _score
from meshrl.rewardd.pool.rule import FunctionSpec
from meshrl.rewardd.pool.signatures import BadShapeError, FunctionKind, as_compute_score
from meshrl.rewardd.reward_stage import token_ends

TEXT = "2 + 2 = 4\n\nso 4\n+ 1 = 5\n \n#### 5"
ENDS = [1, 9, 11, 15, 23, 26, len(TEXT)]
"""Of tokens; the paragraphs of TEXT end at 9, 23 and at the end."""


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

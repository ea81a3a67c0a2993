"""Recipes whose environment leads the policy: gymnasium's frozen lake, GEM's interface, tic-tac-toe's two sides."""

from __future__ import annotations

import random
import re
import runpy
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshrl.contract.rows import column_parts, column_posted
from meshrl.contract.types import (
    PARTS,
    POSTED_REWARD,
    GenerateDelta,
    GenerateRequest,
    Outcome,
    PostedReward,
    Uid,
)
from meshrl.rollout.programs import seats, user
from tests.doubles.scripted import END, VERSION, Scripted, task

from .chats import chat_tokenizer

RECIPE = Path(__file__).parents[3] / "recipes/frozen_lake"


def moves(row: Mapping[str, Any]) -> list[str]:
    """The assistant's messages."""
    return [said["content"] for said in row["messages"] if said["role"] == "assistant"]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    pytest.importorskip("gymnasium")
    monkeypatch.syspath_prepend(str(RECIPE))
    return runpy.run_path(str(RECIPE / "prepare.py"))


async def test_an_episode_is_a_row_with_the_environments_reward(
    prepare: Mapping[str, Any],
) -> None:
    board = "SFFFFHFHFFFHHFFG"
    way = moves(prepare["episode"](board, random.Random(0), 1.0))
    tokenizer, uid = chat_tokenizer(), Uid("run", "t0", 0)
    for said, reward in (
        (way, PostedReward(score=1.0, components={"moves": 6.0, "wrong": 0.0})),
        (["lr", *way], PostedReward(score=1.0, components={"moves": 6.0, "wrong": 1.0})),
        (["d", "r"], PostedReward(score=0.0, components={"moves": 2.0, "wrong": 0.0})),  # a hole
        (["l"] * 12, PostedReward(score=0.0, components={"moves": 12.0, "wrong": 0.0})),
    ):
        policy = Scripted(tokenizer, [turn + END for turn in said])
        program = user.build({"function": f"{RECIPE}/lake.py:play", "posts_reward": True})
        asked = task(tokenizer, max_tokens=2000, extra_info={"board": board})
        rollout = await program(asked, uid, policy, tokenizer)
        assert column_posted(rollout.columns[POSTED_REWARD]) == reward
        assert rollout.outcome is Outcome.OK
        row = rollout.trajectory
        assert policy.text(row.tokens[row.loss_mask.astype(bool)]) == "".join(t + END for t in said)


def test_each_lake_has_a_way_and_none_is_both_trained_on_and_held_out(
    prepare: Mapping[str, Any],
) -> None:
    train, held_out = prepare["lakes"]()
    assert len(train) > 500 and len(held_out) > 100 and not set(train) & set(held_out)
    for board in train[:50]:
        away = prepare["steps_to_goal"](board)
        assert len(moves(prepare["episode"](board, random.Random(0), 1.0))) == away[0] >= 6
        assert 1 <= len(moves(prepare["episode"](board, random.Random(0), 0.0))) <= prepare["MOVES"]


GAME = Path(__file__).parents[3] / "recipes/gem/game.py"


class Higher:
    """The seed is to be named; three attempts, of which the last one may end the episode as cut."""

    def __init__(self, name: str) -> None:
        assert name == "game:Higher"

    def reset(self, seed: int) -> tuple[str, dict[str, str]]:
        self.wanted, self.left = seed, 3
        return "Name it.", {}

    def step(self, said: str) -> tuple[str, float, bool, bool, dict[str, str]]:
        self.left -= 1
        right = said == str(self.wanted)
        return "higher" * (not right), 1.0 if right else -0.25, right, not self.left, {}


@pytest.mark.parametrize(
    ("said", "score"), [(["3", "7"], 0.75), (["7"], 1.0), (["1", "2", "3"], -0.75)]
)
async def test_an_episode_is_a_row_with_the_sum_of_the_steps_rewards(
    said: list[str], score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gem", SimpleNamespace(make=Higher))
    tokenizer = chat_tokenizer()
    policy = Scripted(tokenizer, [turn + END for turn in said])
    program = user.build({"function": f"{GAME}:play", "posts_reward": True})
    asked = task(tokenizer, max_tokens=500, extra_info={"env": "game:Higher", "seed": 7})
    rollout = await program(asked, Uid("run", "t0", 0), policy, tokenizer)
    posted = PostedReward(score=score, components={"turns": float(len(said))})
    assert column_posted(rollout.columns[POSTED_REWARD]) == posted
    assert rollout.outcome is Outcome.OK
    row = rollout.trajectory
    assert policy.text(row.tokens[row.loss_mask.astype(bool)]) == "".join(t + END for t in said)


CROSSES = Path(__file__).parents[3] / "recipes/tic_tac_toe"


class Player:
    """A policy that sees the last board, and answers with what `choose` makes of it."""

    def __init__(self, choose: Callable[[str], str]) -> None:
        self.version = VERSION
        self._choose = choose

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        tokenizer = chat_tokenizer()
        shown = tokenizer.decode_all(request.prompt_ids.tolist())
        board = re.findall(r"[xo]([xo.]{9})", shown)[-1]
        tokens = tokenizer.encode(self._choose(board) + END)
        yield GenerateDelta(
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            version=VERSION,
            finish_reason="stop",
        )


@pytest.fixture
def crosses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, Any]]:
    monkeypatch.syspath_prepend(str(CROSSES))
    monkeypatch.delitem(sys.modules, "game", raising=False)
    yield runpy.run_path(str(CROSSES / "prepare.py"))
    sys.modules.pop("game", None)


@pytest.mark.parametrize(
    ("board", "policy", "knows", "want"),
    [
        (".........", "xo", "xo", {"x": 0.5, "o": 0.5, "wrong": 0.0}),
        ("xx.oo....", "xo", "xo", {"x": 1.0, "o": 0.0, "wrong": 0.0}),
        (".........", "xo", "o", {"x": -0.5, "o": 0.5, "wrong": 1.0}),
        (".........", "x", "x", {"x": 1.0, "wrong": 0.0, "not_lost": 1.0}),
    ],
    ids=["both-know", "x-wins", "x-names-no-cell", "against-random-moves"],
)
async def test_both_sides_of_a_game_are_parts_of_its_row(
    board: str, policy: str, knows: str, want: dict[str, float], crosses: Mapping[str, Any]
) -> None:
    def choose(now: str) -> str:
        mark = crosses["to_move"](now)
        return crosses["CELLS"][crosses["best"](now)] if mark in knows else "z"

    tokenizer, uid = chat_tokenizer(), Uid("run", "t0", 0)
    program = seats.build({"function": f"{CROSSES}/game.py:play", "seats": {"x": {}, "o": {}}})
    info = {"board": board} if policy == "xo" else {"board": board, "policy": policy}
    asked = task(tokenizer, max_tokens=2000, extra_info=info)
    rollout = await program(asked, uid, Player(choose), tokenizer)
    reward = column_posted(rollout.columns[POSTED_REWARD])
    assert reward is not None and reward.components == want
    parts = column_parts(uid, rollout.columns[PARTS], len(rollout.trajectory.tokens))
    spoke = [side for side in policy if side in knows or side == "x"]
    if want["wrong"] or "xx" in board:
        spoke = ["x"]
    assert [part.seat for part in parts] == spoke and rollout.outcome is Outcome.OK


def test_no_opening_is_both_trained_on_and_held_out(crosses: Mapping[str, Any]) -> None:
    train, held_out = crosses["openings"]()
    assert len(train) > 200 and len(held_out) > 40 and not set(train) & set(held_out)
    assert not any(crosses["winner"](board) for board in (*train, *held_out))
    good = crosses["game"](".........", random.Random(1), 1.0)["messages"]
    assert all(said["content"] in crosses["CELLS"] for said in good[1::2])

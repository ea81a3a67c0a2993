"""The recipe gem: an environment with GEM's interface as a row of the program `user`; no GEM is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshrl.contract.rows import column_posted
from meshrl.contract.types import POSTED_REWARD, Outcome, PostedReward, Uid
from meshrl.rollout.programs import user

from .chats import chat_tokenizer
from .scripted import END, Scripted, task

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

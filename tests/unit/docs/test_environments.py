"""The page about environments: its code is run as it stands, with gymnasium, by a policy that knows the way."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshrl.contract.rows import column_posted
from meshrl.contract.types import POSTED_REWARD, Outcome, PostedReward, Uid
from meshrl.rollout.programs import user
from tests.doubles.scripted import END, Scripted, task

from ..rollout.chats import chat_tokenizer

PAGE = (Path(__file__).parents[3] / "docs/how-to/environments.md").read_text()


def way(env: Any) -> list[int]:
    """The actions from start to goal, by breadth-first search in the environment's own table."""
    ways: dict[int, list[int]] = {0: []}
    for state in (queue := [0]):
        for action, ((_, after, reward, ended),) in env.unwrapped.P[state].items():
            if reward:
                return [*ways[state], action]
            if after not in ways and not ended:
                ways[after] = [*ways[state], action]
                queue.append(after)
    raise AssertionError("gymnasium makes maps with a way")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The page's files in the working directory, and the rows that they make."""
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for name, code in blocks:
        Path(name).write_text(code)
    runpy.run_path("make_lakes.py")
    return Path("train.jsonl").read_text().splitlines()


async def test_the_page_plays_frozen_lake(files: list[str]) -> None:
    rows = [json.loads(line) for line in files]
    assert len(rows) == 200 and "@" in rows[0]["prompt"][0]["content"]
    [recipe] = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    options = yaml.safe_load(recipe)["rollout"]["program_options"]
    tokenizer, uid = chat_tokenizer(), Uid("run", "t0", 0)
    lakes = runpy.run_path("frozen_lake.py")
    words = {number: word for word, number in lakes["ACTIONS"].items()}
    actions = way(lakes["lake"](3))
    good = [words[action] for action in actions]
    for turns, reward in (
        (good, PostedReward(score=1.0, components={"wrong": 0.0})),
        (["jump", *good], PostedReward(score=1.0, components={"wrong": 1.0})),
        (["left"] * 12, PostedReward(score=0.0, components={"wrong": 0.0})),
    ):
        policy = Scripted(tokenizer, [turn + END for turn in turns])
        program = user.build(options)
        asked = task(tokenizer, max_tokens=2000, extra_info={"seed": 3})
        rollout = await program(asked, uid, policy, tokenizer)
        assert column_posted(rollout.columns[POSTED_REWARD]) == reward
        assert len(policy.requests) == len(turns)
        row = rollout.trajectory
        said = policy.text(row.tokens[row.loss_mask.astype(bool)])
        assert said == "".join(turn + END for turn in turns)
        assert rollout.outcome is (Outcome.OK if reward.score else Outcome.TRUNCATED)

"""Environments of verifiers, the package as it is installed, played against a worker's gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.types import Outcome
from meshrl.rollout.programs import verifiers as program
from meshrl.testing.engines.echo import Behaviour

from .gateway_agents import echoing
from .gateway_mesh import agents_mesh, check_exact

PYTHON = Path(__file__).parents[2] / ".venv-verifiers/bin/python"
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="no .venv-verifiers here: make venv-verifiers"
)
WORDS = ("apple", "bread", "cloud", "dream", "eagle", "flame", "grape", "house")


def options(env: dict[str, Any], **variables: str) -> dict[str, Any]:
    return {"python": str(PYTHON), "env": env, "variables": variables}


async def test_an_episode_of_a_taskset_gives_its_reward_and_exact_rows(talking_model: Path) -> None:
    env = {"taskset": {"id": "verifiers_sums"}}
    given = options(env, PYTHONPATH=str(Path(__file__).parent))
    row_options = {"program": "verifiers", "extra_info": {"index": 3}, "group_size": 4}
    async with agents_mesh(talking_model, given, sampling={"max_tokens": 6}, **row_options) as mesh:
        rows = await mesh.rows(1)
        assert len(rows) == 4
        for uid, row in rows.items():
            check_exact(mesh, uid, row)
            posted = mesh.posted(uid)
            assert set(posted.components) == {"exact", "said"}
            assert posted.score == posted.components["exact"] + posted.components["said"]
            prompt = mesh.tokenizer.decode(row.tokens[: row.prompt_length].tolist())
            assert "3+1?" in prompt
        assert {mesh.posted(uid).components["said"] for uid in rows} == {0.5}


async def test_a_game_of_textarena_is_played_in_several_turns(
    talking_model: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpora/words"
    corpus.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (corpus / name).write_text("".join(f"{word}\n" for word in WORDS))
    env = {
        "taskset": {"id": "textarena", "game": "Hangman-v0"},
        "player": {"max_turns": 3},
    }
    given = options(env, NLTK_DATA=str(tmp_path))
    row_options = {"program": "verifiers", "extra_info": {"index": 1}, "deadline_s": 120.0}
    async with (
        echoing(talking_model, Behaviour.ANSWER) as engine,
        agents_mesh(
            talking_model,
            given,
            engine=engine,
            prompt_tokens=4000,
            sampling={"max_tokens": 4000},
            **row_options,
        ) as mesh,
    ):
        ((uid, row),) = (await mesh.rows(1)).items()
        check_exact(mesh, uid, row)
        turns = np.flatnonzero(np.diff(row.loss_mask.astype(int)) == 1)
        assert 1 <= len(turns) <= 3
        assert 0.0 <= mesh.posted(uid).score <= 1.0
        assert "game_reward" in mesh.posted(uid).components


async def test_an_environment_is_opened_anew_now_and_then(
    talking_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = tmp_path / program.SERVER.name
    text = program.SERVER.read_text()
    assert "GENERATION_ROWS = 256" in text
    often.write_text(text.replace("GENERATION_ROWS = 256", "GENERATION_ROWS = 2"))
    monkeypatch.setattr(program, "SERVER", often)
    given = options({"taskset": {"id": "verifiers_sums"}}, PYTHONPATH=str(Path(__file__).parent))
    row_options = {"program": "verifiers", "extra_info": {"index": 0}, "group_size": 7}
    async with agents_mesh(talking_model, given, sampling={"max_tokens": 3}, **row_options) as mesh:
        assert len(await mesh.rows(1)) == 7


async def test_a_task_that_there_is_not_is_a_fault_with_its_reason(talking_model: Path) -> None:
    given = options({"taskset": {"id": "verifiers_sums"}}, PYTHONPATH=str(Path(__file__).parent))
    row_options = {"program": "verifiers", "extra_info": {"index": 10}}
    async with agents_mesh(talking_model, given, max_attempts=1, **row_options) as mesh:
        (letter,) = await mesh.dead()
        assert letter.outcome is Outcome.INFRA_FAULT
        assert "the taskset has 10 tasks, and none with number 10" in letter.reason

"""Environments of verifiers, the package as it is installed, played against a worker's gateway."""

from __future__ import annotations

import json
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from meshrl.contract.types import EngineStats, Outcome, PostedReward, Trajectory
from meshrl.rollout.programs import verifiers as program
from meshrl.rollout.tokenizer import load_tokenizer
from meshrl.testing.engines.echo import Behaviour

from ..chat_model import Scripted
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


class _Says(Scripted):
    """An engine whose answers are written down."""

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self.version, running=0, capacity=8, tokens_generated=0, tokens_per_s=1.0,
            updates=0, update_pause_s=0.0,
        )  # fmt: skip


class _Gym(BaseHTTPRequestHandler):
    """A resource server of NeMo Gym: sessions are seeded, `add` is a tool, and what is said at last is judged."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer: Any = {}
        if self.path == "/add":
            answer = body["a"] + body["b"]
        elif self.path == "/verify":
            calls = [item["type"] for item in body["response"]["output"]]
            said = body["response"]["output"][-1]["content"][0]["text"]
            answer = {**body, "reward": float(said == "4"), "calls": calls.count("function_call")}
        found = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


async def test_a_taskset_of_nemo_gym_has_its_tools_and_is_judged_by_its_resource_server(
    talking_model: Path, tmp_path: Path
) -> None:
    number = {"type": "integer"}
    add = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    asked = {
        "input": [{"role": "user", "content": "2+2?"}],
        "tools": [{"type": "function", "name": "add", "description": "", "parameters": add}],
    }
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"responses_create_params": asked}) + "\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gym)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    env = {"taskset": {"id": "nemo_gym", "dataset": str(tasks), "task": {"resources_url": url}}}
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    engine = _Says(load_tokenizer(talking_model), call, "4")
    row_options = {"program": "verifiers", "extra_info": {"index": 0}, "deadline_s": 120.0}
    async with agents_mesh(
        talking_model, options(env), engine=engine, sampling={"max_tokens": 90}, **row_options
    ) as mesh:
        ((uid, row),) = (await mesh.rows(1)).items()
        check_exact(mesh, uid, row)
        text = mesh.tokenizer.decode(row.tokens.tolist())
        assert "[add]" in text and text.count("<tool_call>") == 1
        assert mesh.posted(uid).score == 1
    server.shutdown()
    server.server_close()


HERE = str(Path(__file__).parent)
PRICE = '<tool_call>{"name": "price", "arguments": {"thing": "tea"}}</tool_call>'


def sampled(engine: Scripted, *numbers: int) -> list[int]:
    """The tokens of some answers."""
    return [token for number in numbers for token in engine.sampled[number][0]]


def trained(row: Trajectory) -> list[int]:
    return [int(token) for token in row.tokens[row.loss_mask.astype(bool)]]


async def test_best_of_n_trains_one_try_with_the_reward_of_that_try(
    talking_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = {"id": "best-of-n", "n": 3, "taskset": {"id": "verifiers_sums"}}
    engine = _Says(load_tokenizer(talking_model), "7", "4", "4")
    row_options = {"program": "verifiers", "extra_info": {"index": 3}, "deadline_s": 240.0}
    given = options(env, PYTHONPATH=HERE)
    async with agents_mesh(talking_model, given, engine=engine, **row_options) as mesh:
        ((uid, row),) = (await mesh.rows(1)).items()
        assert trained(row) == sampled(engine, 0)
        assert mesh.posted(uid) == PostedReward(score=0.5, components={"exact": 0.0, "said": 0.5})
    assert "an episode has 3 traces of agent: a row is the first one" in caplog.text


async def test_a_modelled_user_is_not_trained_and_tools_between_its_turns_stay_one_history(
    talking_model: Path,
) -> None:
    env = {"id": "user-sim", "taskset": {"id": "verifiers_shop"}}
    said = ["tea?", PRICE, "3 it is", "buy it", "done", "###DONE###"]
    engine = _Says(load_tokenizer(talking_model), *said)
    row_options = {"program": "verifiers", "extra_info": {"index": 0}, "deadline_s": 240.0}
    async with agents_mesh(
        talking_model,
        options(env, PYTHONPATH=HERE),
        engine=engine,
        prompt_tokens=2000,
        sampling={"max_tokens": 2000},
        **row_options,
    ) as mesh:
        ((uid, row),) = (await mesh.rows(1)).items()
        assert trained(row) == sampled(engine, 1, 2, 4)
        assert mesh.tokenizer.decode_all(row.tokens.tolist()) == (
            f"[price]U:tea?<eos>A:{PRICE}<eos>T:3<eos>A:3 it is<eos>U:buy it<eos>A:done<eos>"
        )
        assert mesh.posted(uid).score == 3


async def test_an_episode_that_is_too_long_is_scored_as_far_as_it_came(
    talking_model: Path,
) -> None:
    env = {"taskset": {"id": "verifiers_shop"}}
    engine = _Says(load_tokenizer(talking_model), PRICE)
    row_options = {"program": "verifiers", "extra_info": {"index": 0}, "deadline_s": 240.0}
    most = {"max_tokens": len(load_tokenizer(talking_model).encode(PRICE)) + 3}
    given = options(env, PYTHONPATH=HERE)
    async with agents_mesh(
        talking_model, given, engine=engine, sampling=most, **row_options
    ) as mesh:
        ((uid, row),) = (await mesh.rows(1)).items()
        assert trained(row) == sampled(engine, 0)
        assert mesh.posted(uid).score == 1


async def test_a_tool_server_that_cannot_start_is_a_fault_with_its_own_reason(
    talking_model: Path, tmp_path: Path
) -> None:
    env = {"taskset": {"id": "verifiers_shop"}}
    missing = tmp_path / "catalogue.txt"
    given = options(env, PYTHONPATH=HERE, SHOP_CATALOGUE=str(missing))
    row_options = {"program": "verifiers", "extra_info": {"index": 0}, "deadline_s": 600.0}
    async with agents_mesh(talking_model, given, max_attempts=1, **row_options) as mesh:
        (letter,) = await mesh.dead()
        assert letter.outcome is Outcome.INFRA_FAULT
        assert letter.reason.endswith(
            "tool server verifiers_shop.ShopTools ended with 1: "
            f"FileNotFoundError: [Errno 2] No such file or directory: '{missing}'"
        )


@pytest.mark.parametrize(
    ("seat", "refused"),
    [
        ({}, False),
        ({"harness": {"id": "null"}}, False),
        ({"harness": {"id": "bash"}}, True),
        ({"harness": {}}, True),  # verifiers takes bash
        ({"harness": None}, True),
        ({"harness": {"id": "bash"}, "runtime": None}, True),
        ({"harness": {"id": "bash"}, "runtime": {"type": "docker"}}, False),
        ({"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}, False),
    ],
)
def test_a_shell_of_the_policy_runs_in_no_process_of_this_user_unless_the_recipe_names_it(
    seat: dict[str, Any], refused: bool
) -> None:
    env = {"taskset": {"id": "verifiers_sums"}, "agent": seat}
    done = subprocess.run(
        [str(PYTHON), "-P", str(program.SERVER), "rows", json.dumps(env), "0", "1"],
        env={"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stderr.strip().splitlines()
    assert (done.returncode, bool(done.stdout)) == ((1, False) if refused else (0, True)), said
    if refused:
        assert said[-1].startswith("ValueError: agent: harness 'bash' runs what the policy writes")
        assert "want runtime: {type: docker}" in said[-1]

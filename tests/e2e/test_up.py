"""`meshrl up` from recipe to export, every service a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshrl.api import run
from meshrl.trainer.trajectories.files import FOLDER
from tests.doubles.collector import collector

from ..chat_model import TEMPLATE
from ..listening import descendants, reachable_sockets, unix_sockets
from ..mesh import PATIENCE_S, make_mesh
from ..run_directory import unnamed_files

pytestmark = pytest.mark.slow


def test_a_run_trains_evaluates_exports_and_balances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started as a user starts it: by fresh interpreters."""
    monkeypatch.setenv("TEST_FORKS", "0")
    mesh = make_mesh(tmp_path, reference=True)
    reachable: set[tuple[str, int]] = set()
    local: set[str] = set()
    with mesh.up() as process:
        while process.poll() is None:
            reachable |= reachable_sockets(process.pid)
            for each in descendants(process.pid):
                with contextlib.suppress(OSError):
                    local |= unix_sockets(each)
            time.sleep(0.2)
        mesh.wait(process)
    assert not reachable, "nothing listens beyond loopback unasked"
    assert not local, "payload has no way beside gRPC"
    assert not unnamed_files(mesh.run_dir), "docs/reference/run-directory.md names every file"
    assert [line["step"] for line in mesh.steps()] == [1, 2, 3, 4]
    assert [m["step"] for m in mesh.metrics() if "val/score/mean" in m] == [0, 2, 4]
    for line in mesh.steps():
        logged = parquet.read_table(
            mesh.run_dir / FOLDER / f"step-{line['step']}.parquet"
        ).to_pylist()
        assert len(logged) == 16 and all(row["prompt"].endswith("?") for row in logged)
        assert sum(row["reward"] for row in logged) / 16 == pytest.approx(line["reward/mean"])
        assert {row["worker"] for row in logged} <= {"rollout-0", "rollout-1"}
    ledger = asyncio.run(mesh.ledger())
    assert ledger.balanced and ledger.trained == 4 * 16
    held_out = asyncio.run(mesh.ledger("tiny.eval"))
    assert held_out.balanced and held_out.trained == 3 * 6
    model = AutoModelForCausalLM.from_pretrained(mesh.export)
    prompt = AutoTokenizer.from_pretrained(mesh.export)("a=1;b=a+2?", return_tensors="pt")
    answered = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answered.shape[1] > prompt["input_ids"].shape[1]


def test_on_policy_runs_are_equal_to_the_bit_also_in_turns_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        changes = {"queue": {"max_staleness": 0}, "rollout": {"on_update": "drain"}}
        mesh = make_mesh(tmp_path / name, changes, reference=True)
        if name == "first":
            mesh.run("trainer.test_freq=-1", "trainer.val_before_train=false")
        else:  # whoever starts it
            monkeypatch.setenv("OMP_NUM_THREADS", "1")
            changes = {"trainer.test_freq": -1, "trainer.val_before_train": False}
            with run(mesh.recipe, {**changes, "placement.colocate": "time_sliced"}) as it:
                assert it.status.state == "running"
                assert it.wait(PATIENCE_S).state == "finished"
            assert all(line["time_slices/held_s"] > 0 for line in mesh.steps()[1:])
            assert all(line["staleness/max"] == 0 for line in mesh.steps())
        weights.append(load_file(mesh.export / "model.safetensors"))
    before = load_file(tmp_path / "first" / "model" / "model.safetensors")
    assert weights[0].keys() == weights[1].keys()
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])
    assert any(bool((weights[0][name] != before[name]).any()) for name in before)


EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "openai_agent.py"
WRAPPED = f"""
import sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
from openai_agent import clients, solve

async def agent(base_url, api_key, task):
    answer = await solve(clients.with_options(base_url=base_url, api_key=api_key), task["messages"][-1]["content"])
    digits = sum(letter.isdigit() for letter in answer)
    # Half of the rows are left to the recipe's reward.
    return {{"score": digits / 16, "posted": 1}} if task["index"] % 2 else None
"""


def test_an_agent_with_the_official_client_is_trained(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(WRAPPED)
    program = {
        "program": "openai",
        "program_options": {"function": f"{tmp_path / 'agent.py'}:agent"},
    }
    changes = {
        "rollout": program,
        "trainer": {"total_training_steps": 2, "test_freq": 2, "save_freq": -1},
    }
    mesh = make_mesh(tmp_path, changes)
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    mesh.run()
    ledger = asyncio.run(mesh.ledger())
    assert ledger.balanced and ledger.trained == 2 * 16
    held_out = asyncio.run(mesh.ledger("tiny.eval"))
    assert held_out.balanced and held_out.trained == 2 * 6
    assert all(line["reward/mean"] >= 0 for line in mesh.steps())
    assert not list((mesh.run_dir / "gateways").iterdir())


# A random model calls nothing on purpose: here every turn that ends in a digit is a call.
FORMAT = """
from meshrl.rollout.tools.ports import ToolCall

def parse(text):
    return [ToolCall(name="count", arguments={"text": text})]
"""
TOOL = '''
def count(text: str) -> str:
    """Count the letters of a text."""
    return str(len(text))
'''
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str) % 2), "turns": float(extra_info["num_turns"])}
"""
CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}answer:{% endif %}"
)


def test_a_policy_calls_tools_and_its_steps_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    options = {
        "tools": ["made/tools.py:count"],
        "format": "made.every_turn",
        "max_turns": 3,
        "max_turn_tokens": 24,
        "stop": list("0123456789"),
    }
    changes = {
        "data": {"max_response_length": 112, "val_files": []},
        "algorithm": {"adv_estimator": "gigpo"},
        "rollout": {"program": "tools", "program_options": options, "on_update": "drain"},
        "queue": {"max_staleness": 0},
        "trainer": {"total_training_steps": 2, "save_freq": -1, "test_freq": -1},
    }
    mesh = make_mesh(tmp_path, changes)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = CALLS
    tokenizer.save_pretrained(tmp_path / "model")
    made = tmp_path / "made"
    made.mkdir()
    for name, text in (("__init__", ""), ("every_turn", FORMAT), ("tools", TOOL)):
        (made / f"{name}.py").write_text(text)
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # a service's working directory holds no code
    with collector() as (url, got):
        mesh.run("trainer.val_before_train=false", "run.trace=1", f"run.trace_otlp={url}")
    steps = mesh.steps()
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert 2 < line["reward_component/turns"] <= 6
        assert 0.3 < line["response/sampled_share"] < 1
        # The trainer finds the log-probs that the engine gave, behind observations too.
        assert line["mismatch/logprob_abs_mean"] < 1e-3
        assert 0 < line["advantages/steps_with_shared_observation"] <= 1
    ledger = asyncio.run(mesh.ledger())
    assert ledger.balanced and ledger.trained == 2 * 16 and not ledger.dead_lettered
    sent = {
        span.span_id.hex(): (resource.resource.attributes[0].value.string_value, span.name)
        for request in got
        for resource in request.resource_spans
        for span in resource.scope_spans[0].spans
    }
    lines = [
        json.loads(line)
        for path in (mesh.run_dir / "spans").iterdir()
        for line in path.read_text().splitlines()
    ]
    # The collector has what the files have, from each service, the turns and the calls of tools between them too.
    assert sent == {line["span"]: (line["service"], line["name"]) for line in lines}
    assert {("feeder", "admit"), ("rollout-0", "tool"), ("trainer", "learn")} <= set(sent.values())

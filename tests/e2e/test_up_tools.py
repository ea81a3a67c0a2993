"""`meshrl up` with a policy that calls tools over several turns, judged step by step."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.doubles.collector import collector

from ..mesh import make_mesh

pytestmark = pytest.mark.slow

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
TEMPLATE = (
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
        "actor": {"use_kl_loss": False},
        "algorithm": {"adv_estimator": "gigpo"},
        "rollout": {"program": "tools", "program_options": options, "on_update": "drain"},
        "queue": {"max_staleness": 0},
        "trainer": {"total_training_steps": 2, "save_freq": -1, "test_freq": -1},
    }
    mesh = make_mesh(tmp_path, changes)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = TEMPLATE
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

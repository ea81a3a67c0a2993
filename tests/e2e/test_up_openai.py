"""`meshrl up` trains an agent of another make: docs/examples/openai_agent.py, as it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ..chat_model import TEMPLATE
from ..mesh import make_mesh

pytestmark = pytest.mark.slow

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
        "rollout": {"n": 4, "slots": 16, **program},
        "trainer": {"total_training_steps": 2, "test_freq": 2, "save_freq": -1},
        "actor": {"optim": {"lr": 1e-3}, "use_kl_loss": False},
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

"""The Codex CLI as it is, on a session of the gateway, where it is installed (npm install -g @openai/codex)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from meshrl.rollout.tokenizer import load_tokenizer
from tests.doubles.scripted import Scripted

from . import gateway_mesh
from .gateway_mesh import agents_mesh

CODEX = shutil.which("codex")
PROVIDER = """\
model = "policy"
model_provider = "mesh"
[model_providers.mesh]
name = "mesh"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
RUN = f"""\
cat > $CODEX_HOME/config.toml <<END
{PROVIDER}END
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "count the lines" < /dev/null
"""
"""The command of an agent, as docs/how-to/codex-and-anthropic.md has it."""


def call(command: str) -> str:
    called = json.dumps({"name": "exec_command", "arguments": {"cmd": command}})
    return f"<tool_call>{called}</tool_call>"


@pytest.mark.skipif(CODEX is None, reason="codex is not installed")
async def test_an_episode_of_codex_with_five_tool_calls_is_one_row(
    talking_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first request has 40 kB. The policy plays a part: a model that can use Codex is no tiny one."""
    said = [call("ls"), call("echo 1 > a"), call("cat a"), call("echo 2 >> a"), call("wc -l a")]
    monkeypatch.setattr(gateway_mesh, "MAX_BODY", 4 << 20)
    places = {name: tmp_path / name for name in ("work", "home")}
    for place in places.values():
        place.mkdir()
    options = {
        "command": ["bash", "-c", RUN],
        "cwd": str(places["work"]),
        "env": {"CODEX_HOME": str(places["home"])},
        "tools_unseen": True,
    }
    engine = Scripted(load_tokenizer(talking_model), [*said, "done"], piece=50)
    async with agents_mesh(
        talking_model,
        options,
        engine=engine,
        prompt_tokens=None,
        sampling={"max_tokens": 200_000},
        deadline_s=120.0,
    ) as mesh:
        ((_, row),) = (await mesh.rows(1)).items()
    told = mesh.tokenizer.decode_all(row.tokens.tolist())
    assert all(f"A:{text}" in told for text in [*said, "done"])
    assert len(engine.requests) == 6 and int(row.loss_mask.sum()) == engine.sampled
    assert (places["work"] / "a").read_text() == "1\n2\n"

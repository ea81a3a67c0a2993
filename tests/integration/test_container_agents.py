"""Agents in the container of their row: one over the published client, mini-swe-agent, Codex, and attackers."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import GenerateRequest, PostedReward, Trajectory
from meshrl.http.gateway.sessions import SessionTable
from meshrl.rollout.agents.session import Address, AgentSession
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers.pool import build_backend
from meshrl.rollout.programs import container_agent
from meshrl.rollout.tokenizer import load_tokenizer
from meshrl.trainer.data.files import file_rows
from tests.doubles.scripted import Scripted

from . import gateway_mesh
from .gateway_mesh import agents_mesh
from .test_boxes import ENGINE_IMAGE, STORE, skip_without
from .test_codex import PROVIDER
from .test_container_program import TOML, harbor

CLIENT = """
import json, os, sys
from openai import OpenAI
task = json.load(sys.stdin)
assert task["messages"][-1]["content"] == os.environ["INSTRUCTION"]
assert not {"ground_truth", "extra_info"} & task.keys(), task
assert os.getcwd() == "/app" and os.environ["COLOUR"] == "blue"
client, messages = OpenAI(), task["messages"]
for _ in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages, timeout=50)
    said = answer.choices[0].message.content
    os.system(said)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
"""
MINI = """
import os, sys
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
model = LitellmModel(
    model_name="openai/policy",
    model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"]},
    cost_tracking="ignore_errors",
)
agent = DefaultAgent(
    model,
    LocalEnvironment(),
    system_template="You can use bash.",
    instance_template="{{task}}",
    step_limit=8,
)
told = agent.run(os.environ["INSTRUCTION"])
assert told["exit_status"] == "Submitted", told
"""
CODEX = f"""\
mkdir -p $CODEX_HOME
cat > $CODEX_HOME/config.toml <<END
{PROVIDER}END
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$INSTRUCTION" < /dev/null
"""
"""As docs/how-to/agents-in-containers.md has it."""
FOUND = shutil.which("codex")
CODEX_JS = Path(FOUND).resolve() if FOUND else None
HELD = """
import json, os, urllib.error, urllib.request, socket
base = os.environ["OPENAI_BASE_URL"]
OTHER_ID, OTHER_KEY = os.environ["OTHER_ID"], os.environ["OTHER_KEY"]
root = base.removesuffix("/v1")
def ask(method, url, body=None, key="unused"):
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        return urllib.request.urlopen(request, timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code
chat = {"model": "policy", "messages": [{"role": "user", "content": "mine"}]}
said = {
    "sample": ask("POST", base + "/chat/completions", chat),
    "sample with another's key": ask("POST", base + "/chat/completions", chat, OTHER_KEY),
    "another's session": ask("POST", root + "/sessions/" + OTHER_ID + "/v1/chat/completions", chat, OTHER_KEY),
    "past the prefix": ask("POST", base + "/models/../../../" + OTHER_ID + "/v1/chat/completions", chat),
    "another's state": ask("GET", base + "/sessions/" + OTHER_ID, key=OTHER_KEY),
    "a claim": ask("POST", base + "/sessions", {"wait_s": 0}),
    "a reward": ask("POST", base + "/reward", {"score": 1.0}),
    "a slash more": ask("POST", base + "/reward/", {"score": 1.0}),
    "health": ask("GET", root + "/health"),
    "docs": ask("GET", root + "/docs"),
    "the schema": ask("GET", root + "/openapi.json"),
}
for name, port in json.loads(os.environ["PORTS"]).items():
    try:
        socket.create_connection(("127.0.0.1", port), 5)
        said[name] = 200
    except OSError:
        said[name] = 0
with open("/app/said", "w") as file:
    json.dump(said, file)
"""
TELLS = """#!/bin/bash
python3 -c 'import json
json.dump({"reward": 1, **json.load(open("/app/said"))}, open("/logs/verifier/reward.json", "w"))'
"""


@dataclass
class Played:
    row: Trajectory
    reward: PostedReward
    requests: list[GenerateRequest]
    sampled: int
    told: str


async def play(
    model: Path,
    folder: Path,
    said: Sequence[str],
    *command: str,
    lent: Sequence[Path] = (),
    backend: str = "bubblewrap",
    **options: Any,
) -> Played:
    """One row of a task, by a policy that is scripted."""
    await skip_without(backend)
    [task] = file_rows([folder])
    engine = Scripted(load_tokenizer(model), said, piece=50)
    settings = {
        "backend": backend,
        "boxes": 1,
        "store": STORE,
        "lent": list(lent),
        "limits": {"memory_bytes": 4 << 30},
    }
    async with agents_mesh(
        model,
        {"command": list(command), "root": "host", "tools_unseen": True, **options},
        engine=engine,
        program="container_agent",
        containers=ContainersConfig.model_validate(settings),
        extra_info=task.values["extra_info"],
        prompt_tokens=None,
        sampling={"max_tokens": 200_000},
        deadline_s=120.0,
        max_attempts=1,
    ) as mesh:
        ((uid, row),) = (await mesh.rows(1)).items()
        reward = mesh.posted(uid)
    text = mesh.tokenizer.decode_all(row.tokens.tolist())
    return Played(row, reward, engine.requests, engine.sampled, text)


def site_packages() -> Path:
    """A folder with the published client that the boxes' user can read; skips where there is none."""
    import openai

    return Path(openai.__file__).parents[1]


async def test_a_program_of_ours_solves_a_task_with_the_published_client(
    talking_model: Path, tmp_path: Path
) -> None:
    packages = site_packages()
    played = await play(
        talking_model,
        harbor(tmp_path / "task"),
        ["echo 41 > answer", "echo 42 > answer"],
        "python3",
        "-c",
        CLIENT,
        lent=[packages],
        env={"PYTHONPATH": str(packages)},
    )
    assert played.reward.score == 1.0
    assert played.told.count("echo 4") == 2 and len(played.requests) == 2
    assert int(played.row.loss_mask.sum()) == played.sampled


@pytest.mark.parametrize("backend", ["podman", "docker"])
async def test_an_agent_works_in_a_container_of_an_engine(
    talking_model: Path, tmp_path: Path, backend: str
) -> None:
    folder = harbor(tmp_path / "task", test="#!/bin/sh\ngrep -q 42 /answer && [ -f /lent/here ]\n")
    lent = tmp_path / "lent"
    lent.mkdir()
    (lent / "here").touch()
    body = json.dumps({"model": "policy", "prompt": "hi"})
    ask = f"wget -q -O- --header 'content-type: application/json' --post-data '{body}'"
    played = await play(
        talking_model,
        folder,
        ["one"],
        "sh",
        "-c",
        f"{ask} $OPENAI_BASE_URL/completions | grep -q one && ls {lent}/here && echo 42 > /answer; mkdir /lent;"
        f" cp {lent}/here /lent; {ask} $OPENAI_BASE_URL/reward && rm /answer; true",
        lent=[lent],
        backend=backend,
        root=ENGINE_IMAGE.name,
    )
    assert played.reward.score == 1.0 and len(played.requests) == 1


def called(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_mini_swe_agent_solves_a_task(talking_model: Path, tmp_path: Path) -> None:
    """Its packages, for this machine's /usr/bin/python3, are lent to the container."""
    mini = shutil.which("mini")
    found = [*Path(mini).parents[1].glob("lib/python3.*/site-packages")] if mini else []
    if not found:
        pytest.skip("mini-swe-agent is not installed")
    last = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    commands = ["ls", "expr 40 + 2 > answer", "cat answer", last]
    played = await play(
        talking_model,
        harbor(tmp_path / "task"),
        [called("bash", command=command) for command in commands],
        "python3",
        "-c",
        MINI,
        lent=found,
        env={
            "PYTHONPATH": str(found[0]),
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )
    assert played.reward.score == 1.0
    assert len(played.requests) == 4 and int(played.row.loss_mask.sum()) == played.sampled
    assert "note.txt" in played.told and played.told.count("expr 40 + 2") == 1


async def test_codex_solves_a_task(
    talking_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """npm install @openai/codex; its folder is lent to the container."""
    if CODEX_JS is None:
        pytest.skip("codex is not installed")
    modules = CODEX_JS.parents[3]
    monkeypatch.setattr(gateway_mesh, "MAX_BODY", 4 << 20)
    commands = ["ls", "expr 40 + 2 > answer", "cat answer"]
    played = await play(
        talking_model,
        harbor(tmp_path / "task"),
        [*(called("exec_command", cmd=command) for command in commands), "done"],
        "bash",
        "-c",
        CODEX,
        lent=[modules],
        env={"CODEX_HOME": "/root/codex", "PATH": f"{modules}/.bin:/usr/bin:/bin"},
    )
    assert played.reward.score == 1.0
    assert len(played.requests) == 4 and int(played.row.loss_mask.sum()) == played.sampled
    assert "note.txt" in played.told


async def test_an_agent_samples_for_its_own_row_and_does_nothing_else(
    talking_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the key of another row, even, nor by the ports of this machine's services."""
    found: dict[str, str] = {}
    others: list[AgentSession] = []
    bound = SessionTable.bound

    @asynccontextmanager
    async def beside_another(
        table: SessionTable, address: Address, listener: socket.socket
    ) -> AsyncIterator[Address]:
        (own,) = table._open.values()
        other = AgentSession(own.task, own.uid, own._engine, own._tokenizer)
        others.append(other)
        with socket.create_server(("127.0.0.1", 0)) as service, table.opened(other):
            ports = {"gateway": urlsplit(table.url).port, "service": service.getsockname()[1]}
            found.update(OTHER_ID=other.id, OTHER_KEY=other.token, PORTS=json.dumps(ports))
            async with bound(table, address, listener) as inside:
                assert own.token not in repr(inside) and own.id not in repr(inside)
                yield inside

    monkeypatch.setattr(SessionTable, "bound", beside_another)
    monkeypatch.setattr(container_agent, "_instruction", lambda task: found)
    played = await play(
        talking_model,
        harbor(tmp_path / "task", test=TELLS),
        ["one", "two"],
        "python3",
        "-c",
        HELD,
    )
    told = played.reward.components
    sampled = {"sample": 200.0, "sample with another's key": 200.0}
    assert {name: status for name, status in told.items() if status == 200} == sampled
    refused = {name: status for name, status in told.items() if name not in sampled}
    assert refused.pop("gateway") == refused.pop("service") == 0
    assert refused.pop("past the prefix") == 405
    assert len(refused) == 8 and set(refused.values()) == {403.0}
    assert not others[0].asked and others[0].reward is None
    assert len(played.requests) == 2 and played.reward.score == 1.0


@pytest.mark.parametrize("command", ["exit 3", "kill -9 $PPID $$", "sleep 100"])
async def test_an_agent_that_fails_or_is_late_is_scored_as_it_left_its_container(
    talking_model: Path, tmp_path: Path, command: str
) -> None:
    """Its policy may have ended it: the row is no fault of the machine's."""
    ask = "from openai import OpenAI\nOpenAI().completions.create(model='policy', prompt='hi')"
    packages = site_packages()
    toml = TOML.replace("[agent]\ntimeout_sec = 60.0", "[agent]\ntimeout_sec = 15.0")
    played = await play(
        talking_model,
        harbor(tmp_path / "task", toml=toml),
        ["one"],
        "sh",
        "-c",
        f'python3 -c "{ask}"; echo 42 > answer; {command}',
        lent=[packages],
        env={"PYTHONPATH": str(packages)},
    )
    assert played.reward.score == 1.0 and len(played.requests) == 1


async def test_an_agent_that_never_asks_is_a_fault_with_its_last_words(
    talking_model: Path, tmp_path: Path
) -> None:
    await skip_without("bubblewrap")
    [task] = file_rows([harbor(tmp_path / "task")])
    async with agents_mesh(
        talking_model,
        {"command": ["no-such-agent"], "root": "host"},
        engine=Scripted(load_tokenizer(talking_model), ["one"]),
        program="container_agent",
        containers=ContainersConfig(boxes=1, store=STORE),
        extra_info=task.values["extra_info"],
        max_attempts=1,
    ) as mesh:
        (dead,) = await mesh.dead()
    assert "no-such-agent ended with 127: no-such-agent: No such file" in dead.reason


def test_options_and_folders_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="command"):
        container_agent.build({}, gateway=None, boxes=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="external"):
        container_agent.build({"command": ["x"], "external": True}, gateway=None, boxes=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lent: want an absolute path below /"):
        ContainersConfig(lent=[Path("lent")])
    with pytest.raises(ConfigError, match=r"lent: no folder .*missing here"):
        build_backend(ContainersConfig(lent=[tmp_path / "missing"]))

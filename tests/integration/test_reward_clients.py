"""The registry from the command line and from Python: commands, answers and errors."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshrl.cli.commands.reward import reward
from meshrl.contract.errors import MeshError, NotFoundError, UnavailableError, UserError
from meshrl.rewardd.client import AsyncRewardClient, RewardClient
from meshrl.rpc.credentials import MeshRole, file_of_role, open_run_directory, verifiers_file

from .test_reward_servers import Service, serving, source

DOCS = Path(__file__).parents[2] / "docs"


async def cli(service: Service, *arguments: str) -> Result:
    command = ["--reward", service.grpc, *arguments]
    return await asyncio.to_thread(CliRunner().invoke, reward, command)


async def run_command(service: Service, *arguments: str) -> str:
    result = await cli(service, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return str(result.stdout)


async def test_a_ground_truth_is_text_unless_it_is_said_to_be_json(tmp_path: Path) -> None:
    text = source(1).replace("return 1", "return float(ground_truth == '42')")
    (tmp_path / "same.py").write_text(text)
    async with serving(tmp_path) as service:
        await run_command(service, "submit", str(tmp_path / "same.py"))
        trial = ("test", "same", "--solution", "x")
        assert (await run_command(service, *trial, "--truth", "42")).startswith("1  (")
        assert (await run_command(service, *trial, "--truth-json", "42")).startswith("0  (")
        for wrong in (("--truth-json", "[4"), ("--truth", "4", "--truth-json", "4")):
            assert isinstance((await cli(service, *trial, *wrong)).exception, UserError)


async def test_each_command_works(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"r{number}.py").write_text(source(number))
    (tmp_path / "tests.jsonl").write_text('{"solution": "x", "score": 1}\n')
    rows = [{"solution": "x", "ground_truth": n, "id": n} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with serving(tmp_path) as service:
        submit = ("submit", str(tmp_path / "r1.py"), "--name", "reward")
        limit = ("--limit", "deadline_s=2")
        tests = ("--tests", str(tmp_path / "tests.jsonl"))
        one = (await run_command(service, *submit, *tests, *limit)).split()[0]
        assert service.registry.manifest(one).limits == {"deadline_s": 2.0}
        message = await run_command(
            service, "submit", str(tmp_path / "r2.py"), "--name", "reward", "--hold"
        )
        two = message.split()[0]
        assert message == f"{two}  reward points to {one} (0 tests passed)\n"
        assert await run_command(service, "show", "reward") == source(1)
        assert (await run_command(service, "diff", "reward", one, two)).endswith("+    return 2\n")
        assert (await run_command(service, "test", "reward", "--solution", "x")).startswith("1  (")
        compared = await run_command(
            service, "compare", "reward", one, two, "--samples", str(tmp_path / "rows.jsonl")
        )
        assert "mean 1 -> 2" in compared
        assert ": 1 -> 2  x\n" in compared  # what differs most, with its text
        assert await run_command(service, "rollback", "reward", two) == f"reward points to {two}\n"
        listing = await run_command(service, "list")
        assert f"scoring: {two} (as 'reward' says)" in listing
        assert json.loads(await run_command(service, "list", "--json"))["scoring"] == two
        out = tmp_path / "scored.jsonl"
        await run_command(
            service, "rescore", "reward", str(tmp_path / "rows.jsonl"), "--out", str(out)
        )
        scored = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(row["id"], row["score"], row["reward_hash"]) for row in scored] == [
            (n, 2.0, two) for n in range(5)
        ]
        assert await run_command(service, "retire", "reward", one) == f"reward: {one} is retired\n"


ERRORS = {
    "submit nowhere.py": "nowhere.py: No such file or directory",
    "submit bad.py --name reward": "the source, line 1: ",
    "submit r.py --tests broken.jsonl": "broken.jsonl:1: not JSON",
    "submit r.py --limit deadline_s": "--limit 'deadline_s': want NAME=NUMBER",
    "submit r.py --limit deadline_s=60": "exceeds what the operator allows (10.0)",
    "show nobody": "no reward is called 'nobody'",
    "compare reward a --samples broken.jsonl": "broken.jsonl:1: not JSON",
}


async def test_an_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "r.py").write_text(source(1))
    (tmp_path / "broken.jsonl").write_text("{\n")
    async with serving(tmp_path) as service:
        for words, line in ERRORS.items():
            result = await cli(service, *words.split())
            assert isinstance(result.exception, MeshError), words
            assert line in str(result.exception) and "\n" not in str(result.exception)


def test_a_token_is_printed_once_and_only_its_hash_is_stored() -> None:
    result = CliRunner().invoke(reward, ["token", "ann", "--roles", "read,submit"])
    assert result.exit_code == 0
    token = result.stderr.split()[-1]
    assert token.startswith("mrl_") and token not in result.stdout
    assert 'name: "ann", roles: [read, submit], sha256: ' in result.stdout
    refused = CliRunner().invoke(reward, ["token", "ann", "--roles", "root"])
    assert str(refused.exception) == "no role 'root'; there are read, submit, operate, claim"


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="no curl or no jq")
async def test_the_curl_commands_of_the_docs_work_as_they_stand(tmp_path: Path) -> None:
    page = (DOCS / "how-to" / "submit-rewards.md").read_text()
    (block,) = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_reward.py").write_text(source(1))
    commands = block.splitlines()
    assert len(commands) > 4 and all("curl " in command for command in commands)
    open_run_directory(tmp_path / "run")
    operator = file_of_role(tmp_path / "run", MeshRole.OPERATOR).read_text().strip()
    async with serving(tmp_path, verifiers=verifiers_file(tmp_path / "run")) as service:
        for command in commands:
            process = await asyncio.create_subprocess_shell(
                command.replace("curl ", "curl -sS --fail-with-body ", 1),
                cwd=tmp_path,
                env={
                    **os.environ,
                    "URL": service.http,
                    "AUTH": f"Authorization: Bearer {operator}",
                    "no_proxy": "*",
                },
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await process.communicate()
            assert process.returncode == 0, (command, output)
            assert json.loads(output)


def test_the_python_clients_send_no_token_unencrypted_beyond_this_machine() -> None:
    for kind in (RewardClient, AsyncRewardClient):
        with pytest.raises(UserError, match="the token would travel to http://mesh:1 unencrypted"):
            kind("http://mesh:1", token="mrl_")
        kind("http://mesh:1")
        kind("https://mesh:1", token="mrl_")
        kind("http://mesh:1", token="mrl_", allow_plain_http=True)


async def test_a_proxy_of_the_environment_sees_no_token_on_its_way_to_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1 << 16))
        writer.close()

    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "")
        async with AsyncRewardClient("http://127.0.0.1:1", token="mrl_") as client:
            with pytest.raises(UnavailableError):
                await client.list()
    assert heard == []


async def test_the_python_clients_return_the_service_s_answers(tmp_path: Path) -> None:
    async with serving(tmp_path, closed=True) as service:
        token = service.tokens["boss"]

        def blocking() -> Any:
            with RewardClient(service.http, token=token) as rewards:
                version = rewards.submit(
                    "reward", source=source(3), tests=[{"solution": "", "score": 3}]
                )
                assert rewards.list()["scoring"] == version["hash"]
                with pytest.raises(UserError, match="line 1"):
                    rewards.submit("reward", source="def f(:")
                return version["hash"]

        version = await asyncio.to_thread(blocking)
        async with AsyncRewardClient(service.http, token=token) as rewards:
            (score,) = await rewards.score("reward", [{"solution": "x"}])
            assert (score["score"], score["reward_hash"]) == (3.0, version)
            assert (await rewards.show("reward"))["source"] == source(3)
            with pytest.raises(NotFoundError, match="nobody"):
                await rewards.show("nobody")
    with (
        RewardClient(service.http) as gone,
        pytest.raises(UnavailableError, match="cannot be reached"),
    ):
        gone.list()

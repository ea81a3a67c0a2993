"""Tasks for containers: Harbor's folders and SWE-bench's rows become rows, and a bad one is one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from meshrl.common.container_tasks import KEY, ContainerTask
from meshrl.contract.errors import UserError
from meshrl.trainer.data.files import FileRow, file_rows

TEMPLATE = """schema_version = "1.4"

[metadata]

[verifier]
timeout_sec = 900.0

[agent]
timeout_sec = 900.0

[environment]
build_timeout_sec = 600.0
"""
"""The file that `harbor init` of harbor 0.26.0 writes."""
DOCUMENTED = """
version = "1.0"
source = "here"
artifacts = ["/app", {source = "/var/log/app.log", exclude = ["*.gz"]}]

[task]
name = "org/hello"
keywords = ["trivial"]

[metadata]
author_name = "Someone"
difficulty = "easy"
tags = ["trivial", "alpine"]

[verifier]
timeout_sec = 120.0
env = { SEED = "7" }
user = "root"
environment_mode = "separate"

[agent]
timeout_sec = 60.0

[environment]
docker_image = "alpine:3.20"
cpus = 1
memory_mb = 2048
storage_mb = 10240
gpus = 0
allow_internet = false
workdir = "/srv"
env = { COLOUR = "blue" }

[solution.env]
ANSWER = "42"
"""


def task(folder: Path, toml: str = TEMPLATE) -> Path:
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Say hello.\n")
    (folder / "environment/Dockerfile").write_text("FROM ubuntu:24.04\nWORKDIR /app")
    (folder / "tests/test.sh").write_text("#!/bin/bash\n")
    return folder


def told(row: FileRow) -> ContainerTask:
    return ContainerTask.model_validate(json.loads(json.dumps(row.values["extra_info"]))[KEY])


def test_a_folder_of_tasks_is_rows_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("second", "first"):
        task(tmp_path / name)
    (tmp_path / "README.md").write_text("no task")
    rows = list(file_rows([tmp_path]))
    assert [told(row).name for row in rows] == ["first", "second"]
    assert rows[0].values["prompt"] == [{"role": "user", "content": "Say hello."}]
    assert told(rows[0]) == ContainerTask(
        name="first",
        build=str(tmp_path / "first/environment"),
        agent_s=900.0,
        tests=str(tmp_path / "first/tests"),
        tests_s=900.0,
    )


def test_every_key_that_harbor_documents_is_played_or_known_to_change_nothing(
    tmp_path: Path,
) -> None:
    folder = task(tmp_path / "hello", DOCUMENTED)
    for named in (folder, folder / "task.toml"):
        [row] = file_rows([named], "harbor")
        assert told(row) == ContainerTask(
            name="hello",
            image="alpine:3.20",
            workdir="/srv",
            variables={"COLOUR": "blue"},
            cpus=1,
            memory_bytes=2048 << 20,
            disk_bytes=10240 << 20,
            agent_s=60.0,
            tests=str(folder / "tests"),
            tests_s=120.0,
            test_variables={"SEED": "7"},
            separate=True,
            artifacts=["/app", "/var/log/app.log"],
        )


@pytest.mark.parametrize(
    ("toml", "wants"),
    [
        ("[verifier]\ntimeout_sec = 'soon'", "verifier.timeout_sec: Input should be a valid"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec: Input should be greater than 0"),
        ("[verifier", "Expected ']'"),
        ("steps = [{name = 'a'}]", "steps: "),
        ("[environment]\nos = 'windows'", "environment.os: 'windows' is not supported"),
        ("[environment]\ngpus = 2", "environment.gpus: 2 is not supported; want 0"),
        ("[environment]\nnetwork_mode = 'allowlist'", "want 'no-network' or 'public'"),
        ("[verifier]\nenv = { KEY = '${OPENAI_API_KEY}' }", "verifier.env.KEY: "),
        ("[verifier.environment]\ncpus = 1", "verifier.environment: "),
        ("[agent]\nuser = 'agent'", "agent.user: 'agent' is not supported"),
        ("artifacts = ['logs']", "artifacts.0.source: 'logs', want an absolute path"),
        ("artifacts = ['/app/../..']", "artifacts.0.source: '/app/../..', want an absolute path"),
        ("[verifier]\nenvironment_mode = 'separate'", "artifacts: none"),
        ("[environment]\nworkdir = 'app'", "environment.workdir: 'app', want an absolute path"),
        ("[environment.env]\n'A=B' = 'c'", "environment.env: 'A=B': a variable has"),
        ('[verifier.env]\nA = "a\\u0000"', "verifier.env: 'A': a variable has"),
        ("environment = 3", "environment: Input should be a valid dictionary"),
    ],
)
def test_a_task_that_cannot_be_played_is_one_line_with_file_and_key(
    tmp_path: Path, toml: str, wants: str
) -> None:
    folder = task(tmp_path / "bad", toml)
    with pytest.raises(UserError) as refused:
        list(file_rows([tmp_path]))
    assert refused.value.message.startswith(str(folder / "task.toml"))
    assert wants in refused.value.message
    assert "\n" not in refused.value.message


def test_a_task_without_an_instruction_is_refused(tmp_path: Path) -> None:
    (task(tmp_path / "bad") / "instruction.md").write_text("\n")
    with pytest.raises(UserError, match=r"instruction\.md: no text"):
        list(file_rows([tmp_path]))


@pytest.mark.parametrize("name", ["instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_a_file_that_a_task_lacks_is_named(tmp_path: Path, name: str) -> None:
    folder = task(tmp_path / "bad")
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        list(file_rows([tmp_path]))


TERMINAL_BENCH = """schema_version = "2.0"
artifacts = ["/app/output.json"]
[task]
name = "terminal-bench/example-task"
[verifier]
timeout_sec = 120.0
environment_mode = "separate"
[verifier.env]
[environment]
cpus = 2
gpus = 0
mcp_servers = []
network_mode = "public"
"""


def test_a_task_of_terminal_bench_brings_the_container_of_its_tests(tmp_path: Path) -> None:
    folder = task(tmp_path / "example", TERMINAL_BENCH)
    [row] = file_rows([folder])
    assert not told(row).tests_build
    (folder / "tests/Dockerfile").write_text("FROM ubuntu:24.04\nCOPY . /tests/\n")
    [row] = file_rows([folder])
    assert told(row).separate
    assert told(row).artifacts == ["/app/output.json"]
    assert told(row).tests_build == str(folder / "tests")


def test_services_beside_the_container_are_refused(tmp_path: Path) -> None:
    folder = task(tmp_path / "bad")
    (folder / "environment/docker-compose.yaml").write_text("services: {}")
    with pytest.raises(UserError, match=r"docker-compose\.yaml: not supported"):
        list(file_rows([tmp_path]))


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"without tasks; want a file, or folders with task\.toml"):
        list(file_rows([tmp_path]))
    with pytest.raises(UserError, match="no such file"):
        list(file_rows([tmp_path / "absent"], "harbor"))


SWE: dict[str, Any] = {
    "instance_id": "org__repo-1",
    "problem_statement": "add(1, 2) is -1",
    "image_name": "swe/repo:1",
    "FAIL_TO_PASS": '["test_add.py::test_add"]',
    "PASS_TO_PASS": ["test_add.py::test_zero[a b]", "more/test_it.py::test_it"],
    "test_patch": "--- a/x\n",
    "base_commit": "abc",
}


def swe(folder: Path, **changes: Any) -> list[FileRow]:
    row = {**SWE, **changes}
    file = folder / "swe.parquet"
    parquet.write_table(arrow.Table.from_pylist([row]), file)
    return list(file_rows([file], "swe"))


def test_a_row_of_swe_bench_names_its_image_and_its_tests(tmp_path: Path) -> None:
    (tmp_path / "repo.tar").write_bytes(b"")
    [row] = swe(tmp_path, snapshot="repo.tar")
    made = told(row)
    assert row.values["prompt"] == [{"role": "user", "content": "add(1, 2) is -1"}]
    assert (made.name, made.image, made.workdir) == ("org__repo-1", "swe/repo:1", "/testbed")
    assert made.unpack == {"/testbed": str(tmp_path / "repo.tar")}
    assert made.test_files["files"] == "more/test_it.py\ntest_add.py\n"
    assert made.test_files["fail_to_pass"] == "test_add.py::test_add\n"
    assert made.separate
    assert made.artifacts == ["/testbed"]
    assert made.kept == [f"/testbed/{n}" for n in (".git", "more/test_it.py", "test_add.py", "x")]
    assert "python -m pytest -rA" in made.test_files["test.sh"]


@pytest.mark.parametrize(
    ("changes", "wants"),
    [
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: no tests"),
        ({"FAIL_TO_PASS": "test_add"}, "FAIL_TO_PASS: 'test_add', want a list of tests"),
        ({"FAIL_TO_PASS": "[" * 5000}, "FAIL_TO_PASS: '[[[[["),
        ({"PASS_TO_PASS": ["a\nb"]}, "PASS_TO_PASS: 'a\\nb', want pytest's name"),
        ({"image_name": None}, "no image; want one of image_name, docker_image, image"),
        ({"image_name": 3}, "image_name: 3, want text"),
        ({"problem_statement": " "}, "problem_statement: no text"),
        ({"snapshot": "absent.tar"}, "no such file"),
        ({"test_patch": "test_a.py"}, "test_patch: 'test_a.py', want what `git diff` writes"),
        ({"workdir": "/"}, "workdir: '/', want an absolute path below /"),
        ({"FAIL_TO_PASS": ["../test_a.py::test"]}, "want files of tests below the repository"),
    ],
)
def test_a_bad_row_is_one_line_with_file_row_and_column(
    tmp_path: Path, changes: dict[str, Any], wants: str
) -> None:
    with pytest.raises(UserError) as refused:
        swe(tmp_path, **changes)
    assert refused.value.message.startswith(f"{tmp_path / 'swe.parquet'}:0: ")
    assert wants in refused.value.message

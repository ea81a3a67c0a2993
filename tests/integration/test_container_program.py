"""Rows that work in containers of bubblewrap: the shell, the reward, and what a policy tries to get one unearned."""

from __future__ import annotations

import asyncio
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import uvloop

from meshrl.common.container_tasks import KEY
from meshrl.contract.errors import UserError
from meshrl.contract.rows import column_posted
from meshrl.contract.types import POSTED_REWARD, PostedReward, Uid
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers import proxy
from meshrl.rollout.containers.box import BoxLimits
from meshrl.rollout.containers.bubblewrap import Bubblewrap
from meshrl.rollout.containers.pool import Pool, build_backend
from meshrl.rollout.ports import Rollout
from meshrl.rollout.programs import container
from meshrl.trainer.data.files import file_rows
from tests.doubles.scripted import END, Scripted
from tests.doubles.scripted import task as made_task
from tests.unit.rollout.chats import chat_tokenizer

from .test_boxes import HOST_IMAGE, LIMITS, STORE, skip_without

TOML = "[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 60.0\n"
SEPARATE = 'artifacts = ["/app"]\n' + TOML + 'environment_mode = "separate"\n'
TEST = """#!/bin/bash
if [ "$(python3 -c 'print(open("/app/answer").read().strip())')" = "$(cat /tests/answer)" ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
"""
DONE = f"Done.{END}"


def harbor(folder: Path, toml: str = TOML, test: str = TEST) -> Path:
    """A task: write 42 into /app/answer."""
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Write 42 into /app/answer.")
    dockerfile = (
        "FROM debian:12\n# a remark\nWORKDIR /app\nENV COLOUR=blue \\\n    SIZE='very big'\n"
    )
    (folder / "environment/Dockerfile").write_text(
        dockerfile + "COPY note.txt ./\nRUN wc -c * > made\n"
    )
    (folder / "environment/note.txt").write_text("a note")
    (folder / "tests/test.sh").write_text(test)
    (folder / "tests/answer").write_text("42\n")
    return folder


def bash(command: str) -> str:
    call = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>{json.dumps(call)}</tool_call>{END}"


async def play(
    extra_info: dict[str, Any], turns: Sequence[str], hosts: Sequence[str] = (), **options: Any
) -> tuple[Rollout, PostedReward]:
    await skip_without("bubblewrap")
    config = ContainersConfig(boxes=1, store=STORE, limits=BoxLimits(hosts=tuple(hosts)))
    pool = Pool(build_backend(config), config)
    program = container.build({"root": "host"} | options, gateway=None, boxes=pool)
    tokenizer = chat_tokenizer()
    policy = Scripted(tokenizer, turns)
    row = made_task(tokenizer, max_tokens=8000, extra_info=extra_info)
    try:
        rollout = await program(row, Uid("run", "t0", 0), policy, tokenizer)
    finally:
        await pool.close()
    assert pool.running == 0
    reward = column_posted(rollout.columns[POSTED_REWARD])
    assert reward is not None
    return rollout, reward


async def worked(folder: Path, *commands: str, **options: Any) -> tuple[list[str], float]:
    """Observations of the policy, and its reward."""
    [row] = file_rows([folder])
    turns = [*map(bash, commands), DONE]
    rollout, reward = await play(row.values["extra_info"], turns, **options)
    observed = [str(each["content"]) for each in rollout.messages if each["role"] == "tool"]
    assert len(observed) == len(commands)
    return observed, reward.score


async def test_a_solved_task_is_1_and_another_is_0(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task")
    seen, score = await worked(
        folder,
        "pwd; ls; cat made; echo $COLOUR $SIZE",
        "ls /tests /logs/verifier",
        "echo 42 > answer",
    )
    assert seen[0] == "/app\nmade\nnote.txt\n6 note.txt\nblue very big"
    assert "cannot access '/tests'" in seen[1]
    assert "cannot access '/logs/verifier'" in seen[1]
    assert score == 1.0
    assert (await worked(folder, "echo 41 > answer"))[1] == 0.0


async def test_a_shell_keeps_folder_variables_functions_and_options(tmp_path: Path) -> None:
    seen, _ = await worked(
        harbor(tmp_path / "task"),
        'cd /tmp; export A="a  b" ; B=(1 "2 3"); f() { echo "f $1"; }; umask 077; shopt -s nullglob',
        'pwd; echo "$A" "${B[1]}"; f x; umask; echo *.none; env | grep ^A=',
        "sleep 60 & echo began",
        "pgrep sleep | wc -l",
        "exit 3",
        "false",
        "readonly R=1; IFS=,; set -u; echo $NONE",
        'echo "[$R][$IFS]"',
        "printf 'no newline'; echo oops >&2",
        "trap 'echo bye' EXIT; cd /; exec true",
        "pwd",
    )
    assert seen[0] == "[exit code 0]"
    assert seen[1] == "/tmp\na  b 2 3\nf x\n0077\n\nA=a  b"
    assert seen[2] == "began"
    assert seen[3] == "1"
    assert seen[4] == "[exit code 3]"
    assert seen[5] == "[exit code 1]"
    assert "NONE: unbound variable" in seen[6]
    assert seen[7] == "[1][,]"
    assert seen[8] == "no newlineoops"
    assert seen[10] == "/tmp"


async def test_a_command_that_is_late_or_says_much_is_cut_with_a_notice(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task")
    seen, _ = await worked(
        folder,
        "echo before; sleep 60",
        "seq 100000",
        "echo again",
        call_s=3.0,
        max_result_tokens=64,
    )
    assert seen[0] == "before\n[ended after 3 s, its time limit]"
    assert "...(truncated)..." in seen[1]
    assert len(seen[1]) < 200
    assert seen[2] == "again"


async def test_an_agent_reaches_the_recipes_hosts_and_its_tests_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def here(name: str) -> str:
        return "127.0.0.1"

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\nhello")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setattr(proxy, "_public_address", here)
    monkeypatch.setattr(proxy, "HTTP", port)
    get = (
        "import http.client, os, sys; from urllib.parse import urlsplit as u;"
        ' c = http.client.HTTPConnection(u(os.environ["http_proxy"]).netloc);'
        ' c.request("GET", sys.argv[1]); r = c.getresponse(); print(r.status, r.read().decode())'
    )
    ask = f"python3 -c '{get}' %s"
    direct = f"bash -c 'echo > /dev/tcp/127.0.0.1/{port}' 2>&1 | tail -1"
    test = '#!/bin/bash\n[ -z "$http_proxy$HTTPS_PROXY" ]\n'
    seen, score = await worked(
        harbor(tmp_path / "task", test=test),
        ask % "http://good.example/",
        ask % "http://other.example/",
        ask % f"http://127.0.0.1:{port}/",
        direct,
        hosts=["good.example"],
    )
    server.close()
    assert seen[0] == "302 hello"
    assert seen[1].startswith("403 other.example is none of rollout.containers.limits.hosts")
    assert seen[2].startswith("403 127.0.0.1 is none of")
    assert "refused" in seen[3]
    assert score == 1.0


async def test_no_command_is_run_after_the_time_of_the_task(tmp_path: Path) -> None:
    toml, test = TOML.replace("60.0", "2.0", 1), "#!/bin/bash\n[ ! -e answer ]\n"
    folder = harbor(tmp_path / "task", toml, test=test)
    seen, score = await worked(folder, "sleep 60", "echo 42 > answer")
    assert "its time limit" in seen[0]
    assert seen[1] == "Error: the time of this task is over: no command is run any more"
    assert score == 1.0


@pytest.mark.parametrize(
    ("test", "score", "components"),
    [
        ("exit 0", 1.0, {}),
        ("exit 7", 0.0, {}),
        ("echo 0.25 > /logs/verifier/reward.txt; exit 1", 0.25, {}),
        ('echo \'{"reward": 0.5, "style": 2}\' > /logs/verifier/reward.json', 0.5, {"style": 2.0}),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", 0.0, {"tests_timed_out": 1.0}),
    ],
)
async def test_the_reward_is_a_file_or_the_exit_code(
    tmp_path: Path, test: str, score: float, components: dict[str, float]
) -> None:
    folder = harbor(tmp_path / "task", "[verifier]\ntimeout_sec = 5", f"#!/bin/sh\n{test}\n")
    [row] = file_rows([folder])
    _, reward = await play(row.values["extra_info"], [DONE])
    assert reward == PostedReward(score=score, components={**components, "calls": 0.0})


@pytest.mark.parametrize(
    ("test", "wants"),
    [
        ("echo nan > /logs/verifier/reward.txt", "want a finite number"),
        (
            """printf '{"reward": 1%0400d}' 0 > /logs/verifier/reward.json""",
            "reward.* is 10+, want a finite number",
        ),
        ("printf '%05000d' 0 | tr 0 '[' > /logs/verifier/reward.json", "recursion depth"),
        ("echo passed > /logs/verifier/reward.txt", "could not convert"),
        ("echo '[1]' > /logs/verifier/reward.json", "want an object with reward"),
        ("echo '{\"a\": 1}' > /logs/verifier/reward.json", "want an object with reward"),
        ("head -c 70000 /dev/zero > /logs/verifier/reward.txt", "longer than 65536 bytes"),
    ],
)
async def test_a_reward_that_is_none_is_a_fault_that_names_the_task(
    tmp_path: Path, test: str, wants: str
) -> None:
    folder = harbor(tmp_path / "task", TOML, f"#!/bin/sh\n{test}\n")
    [row] = file_rows([folder])
    with pytest.raises(UserError, match=f"the tests of task: .*{wants}"):
        await play(row.values["extra_info"], [DONE])


WRITES_LATER = (
    "nohup setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done'"
    " > /dev/null 2>&1 & sleep 0.2"
)
ATTACKS = {
    "a reward that is there before": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "a reward of the other kind": (
        "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
    ),
    "a process that writes it later": WRITES_LATER,
    "a folder of rewards elsewhere": (
        "mkdir -p /tmp/v /logs; echo '{\"reward\": 1}' > /tmp/v/reward.json; ln -s /tmp/v /logs/verifier"
    ),
    "logs that lead elsewhere": (
        "mkdir -p /tmp/l/verifier; rm -rf /logs; ln -s /tmp/l /logs;"
        " echo '{\"reward\": 1}' > /tmp/l/verifier/reward.json"
    ),
    "tests of its own": (
        "mkdir -p /tests; printf '#!/bin/sh\\nexit 0\\n' > /tests/test.sh; chmod 555 /tests /tests/test.sh"
    ),
    "tests that lead elsewhere": "mkdir /tmp/t; echo 42 > /tmp/t/answer; ln -s /tmp/t /tests",
    "bash of its own": (
        "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /usr/bin/bash;"
        " cp /usr/bin/bash /usr/local/bin/python3"
    ),
    "variables of the shell": (
        "export BASH_ENV=/tmp/e PYTHONSTARTUP=/tmp/e; echo 'echo 1 > /logs/verifier/reward.txt; exit' > /tmp/e;"
        " cp /tmp/e /root/.bashrc; cp /tmp/e /root/.profile; cp /tmp/e /etc/profile"
    ),
    "a package in the home folder": (
        "d=$(python3 -m site --user-site); mkdir -p $d;"
        ' echo \'import builtins as b; b.print = lambda *_: __import__("os").write(1, b"42")\' > $d/usercustomize.py'
    ),
}


@pytest.mark.parametrize("toml", [TOML, SEPARATE], ids=["same", "separate"])
@pytest.mark.parametrize("name", ATTACKS)
async def test_a_reward_is_not_had_by(tmp_path: Path, name: str, toml: str) -> None:
    folder = harbor(tmp_path / "task", toml)
    _, score = await worked(folder, "echo 41 > answer", ATTACKS[name])
    assert score == 0.0


DEEP = "import os; os.makedirs('/tests'); os.chdir('/tests')\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')"


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /logs; touch /logs",
        "rm -rf /logs; ln -s /proc/self/task /logs",
        "cat /dev/zero > /big",
        f'python3 -c "{DEEP}"',
    ],
)
async def test_an_agent_that_leaves_no_place_for_the_tests_scores_0(
    tmp_path: Path, command: str
) -> None:
    toml, test = f"[environment]\nstorage_mb = 8\n{TOML}", "#!/bin/sh\nexit 0\n"
    [row] = file_rows([harbor(tmp_path / "task", toml, test)])
    _, reward = await play(row.values["extra_info"], [bash(command), DONE])
    assert reward == PostedReward(score=0.0, components={"tests_refused": 1.0, "calls": 1.0})


async def test_no_library_of_the_policy_is_loaded_before_others(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task", TOML, "#!/bin/sh\ntest ! -s /etc/ld.so.preload\n")
    assert (await worked(folder, "echo /tmp/own.so > /etc/ld.so.preload"))[1] == 1.0


async def test_the_tests_stay_as_they_are(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    await worked(folder, f"ls -R {folder}; rm -rf {folder} /tests")
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_only_artifacts_go_on_into_the_container_of_the_tests(tmp_path: Path) -> None:
    test = (
        "#!/bin/bash\n"
        "[ -e /tmp/left ] || [ -e /etc/left ] || [ -e /app/made ] || [ -L /app/out ] && "
        '[ -e /out ] && exit 1\n[ "$(cat answer)" = 42 ]\n'
    )
    folder = harbor(tmp_path / "task", SEPARATE, test)
    _, score = await worked(
        folder,
        "touch /tmp/left /etc/left; rm made; echo 42 > answer; ln -s / out",
        # A tar of its own brings other files along: they are not unpacked.
        "mkdir -p /opt/b; printf '#!/bin/sh\\ntouch /etc/left; exec /usr/bin/tar \"$@\" etc/left\\n' > /opt/b/tar;"
        " chmod +x /opt/b/tar; export PATH=/opt/b:$PATH",
    )
    assert score == 1.0


async def test_artifacts_that_are_not_there_score_0(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task", SEPARATE, "#!/bin/sh\nexec test -e /app/answer\n")
    assert (await worked(folder, "cd /; rm -rf /app"))[1] == 0.0


async def test_the_container_of_the_tests_may_have_a_dockerfile_of_its_own(tmp_path: Path) -> None:
    folder = harbor(
        tmp_path / "task", SEPARATE, "#!/bin/sh\ntest -e /srv/tools && pwd | grep srv\n"
    )
    (folder / "tests/Dockerfile").write_text(
        "FROM x\nCOPY . /tests/\nWORKDIR /srv\nRUN touch tools\n"
    )
    assert (await worked(folder, "ls -d /srv/tools"))[1] == 1.0


async def test_variables_of_a_dockerfile_have_their_values_in_later_steps(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task")
    (folder / "environment/Dockerfile").write_text(
        "FROM debian:12\nENV TOOLS=/opt/tools\nWORKDIR ${TOOLS}/bin\nCOPY note.txt $TOOLS/bin/\n"
        'RUN printf "#!/bin/sh\\necho tool" > tool; chmod +x tool\n'
        'ENV PATH="${TOOLS}/bin:$PATH" NONE=$NONE WORDS="a $TOOLS"\n'
    )
    seen, _ = await worked(folder, "pwd; ls; tool; echo [$NONE] $WORDS")
    assert seen == ["/opt/tools/bin\nnote.txt\ntool\ntool\n[] a /opt/tools"]


@pytest.mark.parametrize(
    ("line", "wants"),
    [
        ("ENV PATH=/nowhere", "task: its container has no bash for the policy: bash: No such file"),
        ("ENV A=${B:-c}", r"Dockerfile:2: ENV .*want variables as \$NAME"),
        ("ENV A='$B'", r"Dockerfile:2: ENV .*want variables as \$NAME"),
        ("ENV A='b", r"Dockerfile:2: ENV A='b: No closing quotation"),
        ("ADD x /x", r"Dockerfile:2: ADD is done by a build only"),
        ("COPY --from=a x /x", r"Dockerfile:2: COPY .*want names of files"),
        ("COPY absent /x", r"Dockerfile:2: COPY absent: no such file"),
        ("COPY ../task.toml /x", r"Dockerfile:2: COPY \.\./task\.toml: no such file"),
        ("RUN exit 3", r"Dockerfile:2: RUN ended with exit code 3"),
    ],
)
async def test_a_step_that_cannot_be_done_is_named(tmp_path: Path, line: str, wants: str) -> None:
    folder = harbor(tmp_path / "task")
    (folder / "environment/Dockerfile").write_text(f"FROM debian:12\n{line}\n")
    with pytest.raises(UserError, match=wants):
        await worked(folder)


PATCH = """--- /dev/null
+++ b/test_sums.py
@@ -0,0 +1,10 @@
+import pytest
+from sums import add
+
+
+def test_add():
+    assert add(1, 2) == 3
+
+@pytest.mark.parametrize("n", [0])
+def test_zero(n):
+    assert add(n, 0) == 0
"""


def swe(folder: Path) -> dict[str, Any]:
    """A repository whose `add` subtracts."""
    (folder / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    with tarfile.open(folder / "repo.tar", "w") as archive:
        archive.add(folder / "sums.py", "sums.py")
    row = {
        "instance_id": "sums-1",
        "problem_statement": "add(1, 2) is -1",
        "image": "host",
        "snapshot": "repo.tar",
        "test_patch": PATCH,
        "test_command": "python3 /tests/runner",
        "FAIL_TO_PASS": ["test_sums.py::test_add"],
        "PASS_TO_PASS": ["test_sums.py::test_zero[0]"],
    }
    parquet.write_table(arrow.Table.from_pylist([row]), folder / "swe.parquet")
    [read] = file_rows([folder / "swe.parquet"], "swe")
    return dict(read.values["extra_info"])


@pytest.mark.parametrize(
    ("command", "score", "fixed", "kept"),
    [
        ("true", 0.0, 0.0, 1.0),
        ("sed -i 's/a - b/a + b/' sums.py", 1.0, 1.0, 1.0),
        ("printf 'def add(a, b):\\n    return 3\\n' > sums.py", 0.0, 1.0, 0.0),
        ("printf 'no python' > sums.py", 0.0, 0.0, 0.0),
        ("printf 'def test_add(): pass\\n' > test_sums.py", 0.0, 0.0, 1.0),
        ("mkdir test_sums.py; touch test_sums.py/x", 0.0, 0.0, 1.0),
    ],
)
async def test_tests_that_failed_must_pass_and_the_others_still(
    tmp_path: Path, command: str, score: float, fixed: float, kept: float
) -> None:
    extra_info = swe(tmp_path)
    runner = "\n".join(
        [
            "import re, sys",
            "sys.path.insert(0, '.')",
            "source = open('test_sums.py').read().replace('import pytest', '')",
            "source = re.sub('@pytest.*', '', source)",
            "space = {}",
            "exec(source, space)",
            "for name, arguments, told in (('test_add', (), ''), ('test_zero', (0,), '[0]')):",
            "    try:",
            "        space[name](*arguments)",
            "        print(f'PASSED test_sums.py::{name}{told}')",
            "    except Exception as error:",
            "        print(f'FAILED test_sums.py::{name}{told} - {error}')",
        ]
    )
    files = extra_info[KEY]["test_files"]
    files["runner"] = runner
    _, reward = await play(extra_info, [bash(command), DONE], root="")
    assert reward.score == score
    assert (reward.components["fixed"], reward.components["kept"]) == (fixed, kept)


async def test_a_patch_that_does_not_fit_is_a_fault(tmp_path: Path) -> None:
    extra_info = swe(tmp_path)
    files = extra_info[KEY]["test_files"]
    files["runner"] = "print('PASSED test_sums.py::test_add\\nPASSED test_sums.py::test_zero[0]')"
    files["test.patch"] = "--- a/sums.py\n+++ b/sums.py\n@@ -1 +1 @@\n-other\n+text\n"
    with pytest.raises(UserError, match=r"sums-1: .*test_patch cannot be applied: 1 out"):
        await play(extra_info, [DONE], root="")
    files["test.patch"] = "--- a/sums.py\n+++ b/sums.py\n@@ -1 +1 @@\n-x\n+def add(a, b):\n"
    _, reward = await play(extra_info, [DONE], root="")
    assert reward.score == 1.0


def test_a_row_without_a_task_is_told_before_the_start() -> None:
    assert "want a task" in container.row_fault({})
    assert "container.name: Field required" in container.row_fault({KEY: {}})
    assert container.row_fault({KEY: {"name": "a", "image": "host"}}) == ""


def test_a_command_may_end_before_it_is_fed_in_the_loop_of_a_worker() -> None:
    async def feed() -> set[int]:
        await skip_without("bubblewrap")
        backend = Bubblewrap(STORE)
        await backend.prepare(HOST_IMAGE)
        box = await backend.start(HOST_IMAGE, LIMITS, row="run/t0/0")
        try:
            stdins = [b"", b"x" * (1 << 20)] * 10
            done = [await box.run(["true"], timeout_s=60.0, stdin=stdin) for stdin in stdins]
            said = await box.run(["cat"], timeout_s=60.0, stdin=b"all of it")
        finally:
            await box.close()
        assert said.output == b"all of it"
        return {each.exit_code for each in done}

    assert uvloop.run(feed()) == {0}

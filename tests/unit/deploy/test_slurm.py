"""The batch script of `meshrl slurm`: what it asks of Slurm, which `meshrl up` it starts; `meshrl credentials`."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from meshrl.cli.commands.up import up
from meshrl.cli.deploy import credentials, slurm
from meshrl.contract.errors import ConfigError, UserError
from meshrl.rpc.credentials import MeshRole, read_verifiers, sha256
from meshrl.rpc.identity import TokenStore

FILES = {
    "packages": {"vllm": True},
    "programs": {"bwrap": True},
    "gpu_memory_gib": 80,
    "models": {"model": {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}},
    "rows": {"train.jsonl": [{"prompt": "1 + 1?", "answer": "2"}]},
    "files": {"reward.py": "def compute_score(**sample): return 0.0"},
}
RECIPE = """
model: {path: model}
data: {train_files: [train.jsonl]}
reward: {custom_reward_function: {path: reward.py}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "there.yaml").write_text(yaml.safe_dump(FILES))
    return tmp_path


def script(*arguments: str) -> str:
    """Output of the command: a script that bash can read."""
    words = ["my.yaml", *arguments, "--assume", "there.yaml"]
    done = CliRunner().invoke(slurm, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
    return done.stdout


def asked(text: str) -> set[str]:
    """The options of sbatch."""
    return set(re.findall(r"^#SBATCH (.+)$", text, re.MULTILINE))


def started(text: str, nodes: str, task: str = "") -> list[str]:
    """The words behind `meshrl up`, as bash makes them on these nodes."""
    stand_ins = f'scontrol() {{ printf "%s\\n" {nodes}; }}\nSLURM_JOB_NODELIST=any SLURM_ARRAY_TASK_ID={task}\n'
    to_up, _, _ = text.partition(" &\nup=$!")
    line = re.sub(r"\n(\S+/)?meshrl up ", '\nprintf "%s\\\\0" ', to_up)
    assert line != to_up
    done = subprocess.run(
        ["bash", "-euc", stand_ins + line], capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def test_two_nodes_with_gpus(here: Path) -> None:
    text = script("rollout.n=4", "--nodes", "2", "--gpus-per-node", "h100:4", "--time", "1-0")
    assert {
        "--job-name=my",
        "--nodes=2",
        "--gpus-per-node=h100:4",
        "--exclusive",
        "--requeue",
        "--time=1-0",
        "--signal=B:USR1@300",
        f"--chdir={here}",
    } <= asked(text)
    words = started(text, "gpu-7 gpu-9")
    options = up.make_context("up", list(words)).params
    assert options["recipe"] == Path("my.yaml")
    assert options["overrides"][0] == "rollout.n=4"
    key, _, value = options["overrides"][1].partition("=")
    assert (key, yaml.safe_load(value)) == ("placement.machines", {"gpu-7": 4, "gpu-9": 4})
    assert options["machines"] == "gpu-7,gpu-9"
    assert "--nodelist={machine}" in shlex.split(options["launcher"])
    assert options["program"] is None
    assert "#   rollout-3  node-1  3        90%" in text
    assert "MESHRL_ALLOW_INSECURE_BIND=1" in text


def test_one_node_listens_on_loopback_and_shares_when_told(here: Path) -> None:
    text = script("--share", "--sbatch=--cpus-per-task=8", "--partition", "main")
    assert "INSECURE" not in text and "placement" not in text
    assert {"--cpus-per-task=8", "--partition=main"} <= asked(text)
    assert "--exclusive" not in asked(text)


def test_a_sweep_is_an_array_with_a_run_for_each_combination(here: Path) -> None:
    text = script("--sweep", "rollout.n=4,8", "--sweep", "actor.optim.lr=1e-6,2e-6")
    assert "--array=0-3" in asked(text)
    points = [started(text, "n1", task)[1:4] for task in "0123"]
    assert points == [
        [f"run.name=my-{task}", f"rollout.n={n}", f"actor.optim.lr={lr}"]
        for task, (n, lr) in enumerate([(4, "1e-6"), (4, "2e-6"), (8, "1e-6"), (8, "2e-6")])
    ]


def test_containers_run_the_services_and_not_up(here: Path) -> None:
    image = "my mesh.sif"
    words = started(script("--container", image, "--gpus-per-node", "2"), "n1")
    program = shlex.split(words[words.index("--program") + 1])
    assert program == ["apptainer", "exec", "--nv", image, "meshrl"]
    words = started(script("--container", image, "--runtime", "pyxis"), "n1")
    launcher = shlex.split(words[words.index("--launcher") + 1])
    assert f"--container-image={image}" in launcher
    assert f"--container-mounts={here}:{here}" in launcher
    assert words[words.index("--program") + 1] == "meshrl"


@pytest.mark.parametrize(
    ("number", "queued"), [(signal.SIGUSR1, "requeue 7\n"), (signal.SIGTERM, "")]
)
def test_the_shell_waits_for_the_save_and_queues_the_job_again_at_its_time_limit_only(
    here: Path, number: signal.Signals, queued: str
) -> None:
    saves = "trap 'sleep 0.3; echo saved; exit 143' TERM; echo up; while :; do sleep 0.1; done"
    (here / "up").write_text(f"#!/bin/bash\n{saves}\n")
    (here / "up").chmod(0o755)
    stand_in = """scontrol() { [ "$1" = show ] && echo n1 || echo "$@"; }\nSLURM_JOB_ID=7\n"""
    text = re.sub(r"\n(\S+/)?meshrl up ", "\n./up ", script())
    text = text.replace(
        "\nup=$!", "\nsleep 0.5\nup=$!"
    )  # the signal comes before the shell has the name
    with subprocess.Popen(
        ["bash", "-c", stand_in + text], stdout=subprocess.PIPE, text=True, bufsize=1
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "up\n"
        job.send_signal(number)
        assert job.stdout.read() == f"saved\n{queued}"
    assert job.returncode == 143


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus-per-node", "h100"], "--gpus-per-node: 'h100': want N or TYPE:N, as h100:8"),
        (["rollout.nn=4"], "no such key 'rollout.nn'"),
        (["--sweep", "rollout.nn=4,8"], "no such key 'rollout.nn'"),
        (["--gpus-per-node", "4", "placement.trainer=5"], "node-0 has 4"),
    ],
)
def test_what_would_not_start_is_said_before_it_is_queued(
    here: Path, words: list[str], said: str
) -> None:
    with pytest.raises((ConfigError, UserError), match=re.escape(said)):
        script(*words)


def made(folder: Path, *options: str) -> dict[str, str]:
    done = CliRunner().invoke(credentials, [str(folder), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_each_role_gets_its_own_and_the_operator_all(tmp_path: Path) -> None:
    found = made(tmp_path, "--apart")
    roles = read_verifiers(tmp_path / "trainer" / "verifiers.json")
    for role in MeshRole:
        assert roles[sha256(found[f"{role}/credential"].strip())] == role
        own = {name for name in found if name.startswith(f"{role}/") and "credentials/" not in name}
        assert own == {f"{role}/credential", f"{role}/verifiers.json"}
        assert (tmp_path / role / "credential").stat().st_mode & 0o077 == 0
        assert found[f"operator/credentials/{role}"] == found[f"{role}/credential"]
    assert {name for name in found if name.startswith("queue/")} == {"queue/verifiers.json"}
    assert made(tmp_path, "--apart") == found


def test_they_lie_as_in_a_runs_directory(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert set(found) == {f"credentials/{name}" for name in [*MeshRole, "verifiers.json"]}
    assert made(tmp_path) == found


def test_a_folder_that_others_read_stays_open_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    made(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "credentials").stat().st_mode & 0o777 == 0o700


def test_a_file_of_tokens_may_have_none_yet(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.touch(0o600)
    file.write_text("tokens:\n")
    assert TokenStore(file)

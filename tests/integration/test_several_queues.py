"""The run directory of a queue of two processes, and its backup, are refused by every command in one line.

`fixtures/queue-of-two.tar.gz` was made at commit c6584707, which reads it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from meshrl.cli import main

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "queue-of-two.tar.gz"
REFUSED = "is one process now; a run on several continues with the meshrl of commit c6584707"
COMMANDS = {
    "up": "up my.yaml --plain --accept-changes",
    "serve queue": "serve queue my.yaml --port 0 --metrics-port 0 --accept-changes",
    "serve trainer": "serve trainer my.yaml --port 0 --metrics-port 0 --accept-changes",
    "ledger": "ledger --run-dir runs/run",
    "dead-letters": "dead-letters --run-dir runs/run",
    "verify": "queue verify --run-dir runs/run",
    "backup": "queue backup copy --run-dir runs/run",
    "runs stored": "runs stored --run-dir runs/run",
    "runs remove": "runs remove run --run-dir runs/run",
}
OF_BACKUPS = [
    "queue verify backup",
    "queue verify backup/queue-0",
    "queue restore backup fresh.yaml",
    "queue restore backup/queue-0 fresh.yaml",
]


@pytest.fixture
def here(tmp_path: Path, talking_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.unpack_archive(ARCHIVE, tmp_path)
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "1+1?", "answer": "2", "data_source": "openai/gsm8k"}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    recipe = {
        "model": {"path": str(talking_model)},
        "data": {
            "train_files": ["train.jsonl"],
            "max_prompt_length": 64,
            "max_response_length": 64,
        },
        "run": {"name": "run"},
        "queue": {"reserve_bytes": 0},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(recipe))
    recipe["run"] |= {"dir": "fresh"}  # type: ignore[operator]
    (tmp_path / "fresh.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def files(folder: Path) -> Mapping[str, bytes]:
    """Stored files by path, without locks."""
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "lock" not in path.name
    }


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2, said
    (line,) = [each for each in said if each.startswith("error: ")]
    assert line.endswith(REFUSED)
    assert "Traceback" not in "".join(said)
    return line


def forget(here: Path, *, note: bool) -> None:
    """Make the directory one of a single queue, but for its store and, with `note`, what `up` noted."""
    recipe = here / "runs/run/recipe.yaml"
    tree = yaml.safe_load(recipe.read_text())
    del tree["queue"]["shards"]
    recipe.write_text(yaml.safe_dump(tree))
    book = here / "runs/run/mesh.json"
    services = json.loads(book.read_text())
    services["services"] = {"queue": services["services"]["queue-0"] | {"kind": "queue"}}
    book.write_text(json.dumps(services))
    if not note:
        (here / "runs/run/queue.shards").unlink()


@pytest.mark.parametrize("left", ["everything", "the note of up", "the note in the store"])
def test_a_run_directory_of_two_queues_is_refused_by_every_command(
    left: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if left != "everything":
        forget(here, note=left == "the note of up")
    before = files(here)
    for words in COMMANDS.values():
        if left != "the note in the store" or not words.startswith(("up", "serve")):
            refused(words, capsys)
            assert files(here) == before, words


def test_a_backup_of_two_queues_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(here)
    for words in OF_BACKUPS:
        refused(words, capsys)
        assert files(here) == before, words


def test_a_queue_that_finds_the_note_in_its_store_serves_nobody(here: Path) -> None:
    forget(here, note=False)
    (here / "runs/run/recipe.yaml").unlink()  # what it began with would be refused as well
    before = files(here / "runs/run/queue")
    ended = subprocess.run(
        [sys.executable, "-m", "meshrl.cli", *COMMANDS["serve queue"].split()],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].endswith(REFUSED)
    assert "Traceback" not in ended.stderr
    assert files(here / "runs/run/queue") == before


@pytest.mark.parametrize("words", ["ledger", "why-waiting", "queue verify", "queue backup copy"])
def test_the_addresses_of_two_queues_are_none_of_one(
    words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--queue", "127.0.0.1:7001,127.0.0.1:7002", "--run", "run"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'127.0.0.1:7001,127.0.0.1:7002' is not an address of a queue" in line


def test_shards_of_a_recipe_are_one_or_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused("config show my.yaml queue.shards=2", capsys)
    assert line.startswith("error: command line: queue.shards=2: queue.shards is 2: a queue is one")
    with pytest.raises(SystemExit) as ended:
        main(["config", "show", "my.yaml", "queue.shards=1"])
    assert not ended.value.code
    (line,) = capsys.readouterr().err.splitlines()
    assert "queue.shards is no longer a key; this changes nothing" in line

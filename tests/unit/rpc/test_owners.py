"""Files that name trusted parties must not be another user's; files with rows are readable only by their owner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.cli.root import main
from meshrl.common import files
from meshrl.common.files import check_owner, check_private_file, replace_file
from meshrl.contract.errors import ConfigError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook, ServiceAddress, run_lock
from meshrl.rpc import credentials
from meshrl.testing.contract.queue_actors import Actors, tasks
from meshrl.transferqueue.admin import back_up
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.disk import DiskStore

SOMEBODY = 12345


@pytest.fixture(autouse=True)
def nothing_in_use() -> Iterator[None]:
    yield
    credentials.use(None)


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run that is not this user's: another made it, or this user is another one."""
    directory = tmp_path / "run"
    credentials.open_run_directory(directory)
    if os.geteuid() == 0:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, SOMEBODY, -1)
    else:
        monkeypatch.setattr(files.os, "geteuid", lambda: SOMEBODY)
    return directory


def test_a_run_directory_of_another_user_is_refused(foreign: Path) -> None:
    for kind in ("queue", "trainer"):
        with pytest.raises(ConfigError, match=r"run\.dir: .* belongs to user"):
            credentials.use_for_service(foreign, kind)
    with pytest.raises(ConfigError, match="belongs to user"):
        credentials.use_run_directory(foreign)


@pytest.mark.parametrize("command", [["ledger"], ["status"], ["fleet"], ["fleet", "drain", "a"]])
def test_a_command_goes_to_no_address_that_another_user_wrote(
    command: list[str],
    foreign: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(credentials.TOKEN_VARIABLE, "mine")
    there = ServiceAddress(kind="trainer", host="127.0.0.1", port=1, metrics_port=0)
    AddressBook(run="a", recipe=foreign / "recipe.yaml", services={"trainer": there}).save(
        foreign / ADDRESS_BOOK_NAME
    )
    with run_lock(foreign), pytest.raises(SystemExit) as ended:
        main([*command, "--run-dir", str(foreign)])
    assert ended.value.code == 2
    assert "error: the run's directory: " in (said := capsys.readouterr().err)
    assert "belongs to user" in said


def test_a_secret_that_another_user_may_change_is_refused(foreign: Path) -> None:
    for name in ("trainer", "verifiers.json"):
        with pytest.raises(ConfigError, match="belongs to user"):
            check_private_file(foreign / "credentials" / name, "credential")


def test_what_is_ours_or_roots_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_owner(tmp_path, "it")
    check_owner(Path("/"), "it")
    monkeypatch.setattr(files.os, "geteuid", lambda: SOMEBODY)
    check_owner(Path("/"), "it")
    with pytest.raises(ConfigError, match="No such file"):
        check_owner(tmp_path / "absent", "it")


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
async def test_a_queue_and_its_backup_outside_of_a_run_are_nobody_elses_to_read(
    tmp_path: Path,
) -> None:
    store = DiskStore(tmp_path / "a" / "queue")
    queue = await TransferQueue.open(store)
    actors = Actors(queue)
    await actors.start()
    await actors.feed(tasks(1))
    await actors.work()
    await back_up(store.export(), tmp_path / "backup")
    await queue.close()
    for folder in (tmp_path / "a" / "queue", tmp_path / "backup"):
        assert folder.stat().st_mode & 0o777 == 0o700
        modes = {path.name: path.stat().st_mode & 0o077 for path in folder.iterdir()}
        assert "data.mdb" in modes
        assert not modes["data.mdb"]


@pytest.mark.usefixtures("usual_umask")
def test_a_private_file_is_so_from_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    draft = tmp_path / f".report.html.{os.getpid()}.tmp"
    draft.write_text("left by another process of this number")
    replace_file(path, "rows", private=True)
    assert path.read_text() == "rows" and path.stat().st_mode & 0o777 == 0o600
    replace_file(path, "rows")
    assert path.stat().st_mode & 0o777 == 0o644

"""A file that is replaced: the old one or the new one, whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshrl.common import files
from meshrl.common.files import check_private_file, lasting_fault, replace_file
from meshrl.contract.errors import ConfigError


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "book.json"
    replace_file(path, "old ü")
    assert path.read_text(encoding="utf-8") == "old ü"
    replace_file(path, b"bytes\n")
    assert path.read_bytes() == b"bytes\n"
    assert list(tmp_path.iterdir()) == [path]

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, "new")
    assert path.read_bytes() == b"bytes\n"


def test_a_disk_that_is_full_is_said_of_the_file_and_nothing_is_left_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "book.json"
    path.write_bytes(b"old")
    write = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        write(self, data[:2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        replace_file(path, "new")
    assert raised.value.filename == str(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o660])
def test_a_secret_that_only_its_owner_and_group_may_read_is_accepted(
    tmp_path: Path, mode: int
) -> None:
    secret = tmp_path / "secret"
    secret.touch()
    secret.chmod(mode)
    link = tmp_path / "link"
    link.symlink_to(secret)
    check_private_file(link, "tls.key")


@pytest.mark.parametrize(
    ("mode", "may"), [(0o644, "read"), (0o602, "change"), (0o666, "read and change")]
)
def test_a_secret_that_everybody_may_read_or_change_is_refused_with_the_remedy(
    tmp_path: Path, mode: int, may: str
) -> None:
    secret = tmp_path / "secret"
    secret.touch()
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=rf"tls\.key: every user .* may {may} .*: chmod o-rw"):
        check_private_file(secret, "tls.key")
    with pytest.raises(ConfigError, match=r"tls\.key: .*No such file"):
        check_private_file(tmp_path / "absent", "tls.key")


def test_an_error_that_another_try_would_meet_names_its_place_and_others_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(OSError) as error:
        missing.read_text()
    assert lasting_fault(error.value) == f"{missing}: No such file or directory"
    assert lasting_fault(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")) == ""
    assert lasting_fault(OSError(errno.EAGAIN, "Resource temporarily unavailable")) == ""
    with pytest.raises(OSError) as error, Path("/dev/full").open("wb", buffering=0) as full:
        full.write(b"1")
    for full_one in ("", "/dev/shm", "/mnt/exports"):
        room = {full_one: SimpleNamespace(f_bavail=0)}
        other = SimpleNamespace(f_bavail=9)
        monkeypatch.setattr(files, "_written_to", lambda: ["/mnt/data", "/mnt/exports"])
        monkeypatch.setattr(
            os, "statvfs", lambda path, room=room, other=other: room.get(path, other)
        )
        where = full_one or "a file"
        assert lasting_fault(error.value) == f"{where}: No space left on device"

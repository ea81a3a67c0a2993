"""transformers' lazy-import table from the user's cache, for a small installation and for the one that is here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.launcher.import_table import Rows, Table, table_of

READ: Table = {
    frozenset(): {"small.configuration_small": {"SmallConfig"}},
    frozenset({"torch"}): {"small.modeling_small": {"Small", "SmallHead"}},
}
ROWS: Rows = [
    ([], {"small.configuration_small": ["SmallConfig"]}),
    (["torch"], {"small.modeling_small": ["Small", "SmallHead"]}),
]


class Installation:
    """A package of models, and how often its files were read."""

    def __init__(self, folder: Path) -> None:
        self.models = folder / "models"
        self.source = folder / "utils" / "import_utils.py"
        (self.models / "small").mkdir(parents=True)
        self.source.parent.mkdir()
        self.source.write_text("VERSION = 1")
        self.file = self.models / "small" / "modeling_small.py"
        self.file.write_text("class Small: ...")
        self.read = 0

    def table(self) -> list[list[object]]:
        def make() -> Table:
            self.read += 1
            return READ

        return [list(row) for row in table_of(self.models, self.source, make)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "meshrl"


@pytest.fixture
def installation(tmp_path: Path, cache: Path) -> Installation:
    return Installation(tmp_path / "transformers")


EXPECTED = [list(row) for row in ROWS]


def test_files_are_read_once_for_two_starts(installation: Installation, cache: Path) -> None:
    assert installation.table() == EXPECTED
    assert installation.table() == EXPECTED
    assert installation.read == 1
    (kept,) = cache.iterdir()
    assert json.loads(kept.read_bytes())[1] == EXPECTED


def _another_version(one: Installation, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules["transformers"], "__version__", "99.0")


def _a_longer_file(one: Installation, patch: pytest.MonkeyPatch) -> None:
    status = one.file.stat()
    one.file.write_text("class Larger: ...")
    os.utime(one.file, ns=(status.st_atime_ns, status.st_mtime_ns))


def _a_file_of_another_time(one: Installation, patch: pytest.MonkeyPatch) -> None:
    one.file.write_text("class Large: ...")
    os.utime(one.file, (0, 0))


def _another_file(one: Installation, patch: pytest.MonkeyPatch) -> None:
    (one.models / "small" / "processing_small.py").touch()


def _a_file_less(one: Installation, patch: pytest.MonkeyPatch) -> None:
    one.file.unlink()


def _other_code(one: Installation, patch: pytest.MonkeyPatch) -> None:
    one.source.write_text("VERSION = 20")


@pytest.mark.parametrize(
    "change",
    [
        _another_version,
        _a_longer_file,
        _a_file_of_another_time,
        _another_file,
        _a_file_less,
        _other_code,
    ],
)
def test_files_are_read_again_after_a_change(
    installation: Installation,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Installation, pytest.MonkeyPatch], None],
) -> None:
    import transformers  # noqa: F401  its version counts

    installation.table()
    change(installation, monkeypatch)
    assert installation.table() == EXPECTED
    assert installation.read == 2
    installation.table()
    assert installation.read == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"\xff\x00" + whole,
        lambda whole: b"[" * 100_000,
        lambda whole: b"null",
        lambda whole: b'{"a": 1, "b": 2}',
        lambda whole: b'["", []]',
        lambda whole: whole.replace(b"SmallHead", b"SmallHeap"),
    ],
)
def test_a_damaged_cache_is_made_again(
    installation: Installation, cache: Path, damage: Callable[[bytes], bytes]
) -> None:
    installation.table()
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert installation.table() == EXPECTED
    assert kept.read_bytes() == whole


@pytest.mark.parametrize("place", ["file/in/its/way", "/proc/nowhere", "folder"])
def test_a_start_without_a_cache_reads_the_files(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
    if place == "folder":  # a folder where the file should be
        installation.table()
        (kept,) = (tmp_path / place / "meshrl").iterdir()
        kept.unlink()
        kept.mkdir()
        installation.read = 0
    assert installation.table() == EXPECTED
    assert installation.table() == EXPECTED
    assert installation.read == 2


def test_a_user_without_a_home_has_no_cache(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert installation.table() == EXPECTED
    assert installation.read == 1


KEPT = """
import json, sys
from meshrl.launcher.import_table import KeepTable
sys.meta_path.insert(0, KeepTable)
import transformers, transformers.models
assert KeepTable not in sys.meta_path
found = sorted((name, where) for module in (transformers, transformers.models)
               for name, where in module._class_to_module.items())
read = transformers.utils.import_utils.create_import_structure_from_path.cache_info().misses
assert transformers.AutoConfig.__name__ == "AutoConfig"
print(json.dumps([found, read]))
"""


def test_transformers_defines_the_same_with_and_without_a_cache(cache: Path) -> None:
    """Names, and where they are: as they are here, and in imports with an empty cache and then with a full one."""
    import transformers
    import transformers.models

    plain = sorted(
        [name, where]
        for module in (transformers, transformers.models)
        for name, where in module._class_to_module.items()
    )
    (first, _), (again, read) = (
        json.loads(subprocess.check_output([sys.executable, "-c", KEPT], text=True))
        for _ in range(2)
    )
    assert plain == first == again
    assert len(plain) > 3_000
    assert read < 100

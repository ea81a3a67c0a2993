"""transformers' table of what its modules define, kept between starts.

At each import transformers reads the 2,500 files of its models to make the table: 0.3 s, a tenth of what torch's
preloader takes. The table is kept as JSON in the user's cache, one file for each installation. It is made again for
another version, where a file has another size or time, and where what is kept is damaged. A cache that cannot be read
or written changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from meshrl.common.files import replace_file

MODULE = "transformers.utils.import_utils"
FUNCTION = "define_import_structure"
Table: TypeAlias = dict[frozenset[str], dict[str, set[str]]]
"""Names by module, by the packages that they need."""
Rows: TypeAlias = list[tuple[list[str], dict[str, list[str]]]]
"""A table as JSON has it."""


class KeepTable:
    """A finder of modules, for `sys.meta_path`: transformers, imported later, takes its table from the cache."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the module that makes the table; None for others."""
        if name != MODULE:
            return None
        sys.meta_path.remove(KeepTable)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_and_keep(module: ModuleType) -> None:
                execute(module)
                if define := getattr(module, FUNCTION, None):
                    setattr(module, FUNCTION, _kept(define, Path(module.__file__ or "")))

            loader.exec_module = exec_and_keep
        return spec


def _kept(define: Callable[..., Table], source: Path) -> Callable[..., Table]:
    """Return transformers' function, for which the table of all models comes from the cache."""
    models = source.parents[1] / "models"

    def define_import_structure(module_path: str | Path, prefix: str | None = None) -> Table:
        folder = Path(module_path)
        if models not in (folder, folder.parent):
            return define(module_path, prefix)
        rows = table_of(models, source, lambda: define(models))
        before = f"{prefix}." if prefix else ""
        return {
            frozenset(needs): {before + module: set(names) for module, names in modules.items()}
            for needs, modules in rows
        }

    return define_import_structure


def table_of(models: Path, source: Path, make: Callable[[], Table]) -> Rows:
    """The table of the package `models`, made by `make` where none is kept that fits.

    Args:
        models: Its folder.
        source: The file of the code that makes it.
        make: Reads all files.
    """
    rows: Rows
    kept: Path | None = None
    with contextlib.suppress(OSError, RuntimeError, ValueError, TypeError):
        version = getattr(sys.modules.get("transformers"), "__version__", "")
        installation = repr([str(models), version, _facts(source.stat()), *_files(models)])
        kept = _cache() / f"transformers-{_digest(str(models))[:16]}.json"
        checksum, rows = json.loads(kept.read_bytes())
        if checksum == _digest(installation, json.dumps(rows)):
            return rows
    rows = [
        (sorted(needs), {module: sorted(names) for module, names in modules.items()})
        for needs, modules in make().items()
    ]
    if kept is not None:
        checksum = _digest(installation, json.dumps(rows))
        with contextlib.suppress(OSError):
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(kept, json.dumps([checksum, rows]))
    return rows


def _cache() -> Path:
    """The user's folder for what can be made again. Raises RuntimeError for a user without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "meshrl"


def _files(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Facts about each Python file below `folder`, in the order of their paths."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir():
            yield from _files(Path(entry.path))
        elif entry.name.endswith(".py"):
            yield entry.path, _facts(entry.stat())


def _facts(status: os.stat_result) -> tuple[int, int]:
    """Size in bytes, and the time of the last write in nanoseconds."""
    return status.st_size, status.st_mtime_ns


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()

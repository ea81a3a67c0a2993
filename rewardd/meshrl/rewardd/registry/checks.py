"""Checks a submission without running any of it: sizes, syntax, entry point, dependencies, the zip."""

from __future__ import annotations

import ast
import difflib
import io
import json
import math
import re
import zipfile
from dataclasses import replace
from pathlib import PurePosixPath

from meshrl.contract.errors import ConfigError, UserError
from meshrl.rewardd.config import RegistryConfig
from meshrl.rewardd.pool.rule import find_function
from meshrl.rewardd.pool.signatures import ARGUMENTS, FunctionKind
from meshrl.rewardd.registry.types import Case, Submission, checked_name
from meshrl.sandbox.limits import Limits

REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(==[A-Za-z0-9][A-Za-z0-9.!+_-]*)?")
WHEEL_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
MAX_WHEEL_FILES = 2000
MAX_NOTE = 1000


def checked(submission: Submission, config: RegistryConfig, bounds: Limits) -> Submission:
    """The submission with entry point, dependencies and limits normalised; `bounds` are the operator's limits.

    Raises:
        UserError: what is wrong, where, and what is wanted; with `line` for a syntax error.
    """
    checked_name(submission.name)
    if bool(submission.source) == bool(submission.wheel):
        raise UserError(
            "a submission has either a Python source or a wheel, and it must not be empty"
        )
    if len(submission.note) > MAX_NOTE:
        raise UserError(f"the note has {len(submission.note)} characters; at most {MAX_NOTE}")
    _check_cases(submission, config)
    deps = tuple(sorted({_dependency(text, config) for text in submission.deps}))
    submission = replace(submission, deps=deps, limits=_limits(submission, bounds))
    return (
        _checked_wheel(submission, config)
        if submission.wheel
        else _checked_source(submission, config)
    )


def _limits(submission: Submission, bounds: Limits) -> dict[str, float]:
    try:
        limits = bounds.bounded(submission.limits)
    except ConfigError as error:
        raise UserError(error.message) from error
    return {name: getattr(limits, name) for name in sorted(submission.limits)}


def _check_cases(submission: Submission, config: RegistryConfig) -> None:
    if len(submission.cases) > config.max_tests:
        raise UserError(f"{len(submission.cases)} tests; at most {config.max_tests}")
    for number, case in enumerate(submission.cases):
        _check_case(f"test {number}", case)


def _check_case(where: str, case: Case) -> None:
    if not math.isfinite(case.score):
        raise UserError(f"{where}: the expected score is {case.score}; want a finite number")
    if not (math.isfinite(case.tolerance) and case.tolerance >= 0):
        raise UserError(f"{where}: the tolerance is {case.tolerance}; want a number from 0 on")
    try:
        json.dumps([case.ground_truth, dict(case.extra_info)], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: ground_truth or extra_info is not JSON: {error}") from error


def _dependency(text: str, config: RegistryConfig) -> str:
    match = REQUIREMENT.fullmatch(text.strip())
    if not match:
        raise UserError(f"dependency {text[:80]!r}: want a package's name, or name==version")
    allowed = {_normal(name): name for name in config.allowed_dependencies}
    if _normal(match[1]) not in allowed:
        near = difflib.get_close_matches(_normal(match[1]), allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        has = ", ".join(sorted(allowed.values())) or "none"
        raise UserError(f"dependency {match[1]!r} is not allowed here{hint} (allowed: {has})")
    return _normal(match[1]) + (match[2] or "")


def _normal(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _checked_source(submission: Submission, config: RegistryConfig) -> Submission:
    try:
        size = len(submission.source.encode())
    except UnicodeEncodeError as error:
        raise UserError(f"the source is not text that UTF-8 can carry: {error}") from error
    if size > config.max_source_bytes:
        raise UserError(f"the source has {size} bytes; at most {config.max_source_bytes}")
    entry = submission.entry_point or _default_entry(submission.kind)
    if not entry.isidentifier():
        raise UserError(f"entry point {entry[:80]!r}: want the name of a function in the file")
    _check_function(submission.source, entry, submission.kind, "the source")
    return replace(submission, entry_point=entry)


def _default_entry(kind: FunctionKind) -> str:
    return "compute_score_batched" if kind is FunctionKind.BATCH else "compute_score"


def _check_function(source: str, entry: str, kind: FunctionKind, where: str) -> None:
    wanted = f"{entry}({', '.join(ARGUMENTS[kind])})"
    function = find_function(source, entry, wanted, where)
    if function is not None:
        _check_arguments(function, kind, where, wanted)


def _check_arguments(
    function: ast.FunctionDef | ast.AsyncFunctionDef, kind: FunctionKind, where: str, wanted: str
) -> None:
    arguments = function.args
    names = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
    missing = [name for name in ARGUMENTS[kind] if name not in names]
    if missing and arguments.kwarg is None:
        raise UserError(
            f"{where}, line {function.lineno}: {function.name} takes no {missing[0]!r} "
            f"(a function of kind {kind} is called by keyword: {wanted})",
            line=function.lineno,
        )


def _checked_wheel(submission: Submission, config: RegistryConfig) -> Submission:
    if len(submission.wheel) > config.max_wheel_bytes:
        raise UserError(
            f"the wheel has {len(submission.wheel)} bytes; at most {config.max_wheel_bytes}"
        )
    entry = submission.entry_point
    if not WHEEL_ENTRY.fullmatch(entry):
        raise UserError(f"entry point {entry[:80]!r} of a wheel: want package.module:function")
    module, _, function = entry.partition(":")
    try:
        with zipfile.ZipFile(io.BytesIO(submission.wheel)) as archive:
            _check_archive(archive, config.max_unpacked_bytes)
            file = _module_file(archive, module)
            data = _read(archive, file, config.max_source_bytes)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, OSError) as error:
        raise UserError(f"the wheel is not a zip archive that can be read: {error}") from error
    except (UnicodeDecodeError, ValueError, zipfile.LargeZipFile) as error:
        raise UserError(f"the wheel is broken: {error}") from error
    _check_function(data, function, submission.kind, f"{file} of the wheel")
    return submission


def _check_archive(archive: zipfile.ZipFile, limit: int) -> None:
    """Check an archive by the sizes that it declares (`_read` does not trust them); unpacks nothing."""
    infos = archive.infolist()
    if len(infos) > MAX_WHEEL_FILES:
        raise UserError(f"the wheel has {len(infos)} files; at most {MAX_WHEEL_FILES}")
    if (size := sum(info.file_size for info in infos)) > limit:
        raise UserError(f"the wheel unpacks to {size} bytes; at most {limit}")
    for info in infos:
        path = PurePosixPath(info.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in info.filename:
            raise UserError(f"the wheel has a file outside itself: {info.filename[:80]!r}")
        if info.flag_bits & 1:
            raise UserError(f"the wheel is encrypted: {info.filename[:80]!r}")
        if path.suffix in (".so", ".pyd", ".dylib", ".dll"):
            raise UserError(
                f"the wheel has native code, {info.filename[:80]!r}: only pure Python is taken"
            )
    if not any(info.filename.endswith(".dist-info/METADATA") for info in infos):
        raise UserError("the archive has no *.dist-info/METADATA: it is not a wheel")


def _module_file(archive: zipfile.ZipFile, module: str) -> str:
    path = module.replace(".", "/")
    names = set(archive.namelist())
    file_name = next(
        (file for file in (f"{path}.py", f"{path}/__init__.py") if file in names), None
    )
    if file_name is None:
        has = ", ".join(sorted(n for n in names if n.endswith(".py"))[:5]) or "no Python file"
        raise UserError(f"the wheel has no module {module!r} (it has {has})")
    return file_name


def _read(archive: zipfile.ZipFile, file: str, limit: int) -> str:
    with archive.open(file) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{file} of the wheel has more than {limit} bytes")
    return data.decode("utf-8")

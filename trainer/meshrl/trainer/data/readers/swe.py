"""Tasks as SWE-bench, SWE-Gym and their relatives have them: a repository, an issue, and tests that must pass then.

Columns of a parquet or jsonl file, for `rollout.program: container`:

    problem_statement            the prompt
    FAIL_TO_PASS, PASS_TO_PASS   pytest's names of tests: lists, or texts of JSON lists
    image_name                   an image with the repository, or `docker_image`, `image`
    snapshot                     a tarball of the repository, beside this file, unpacked in `workdir`
    test_patch                   a patch with the tests (`patch -p1`), put in when the agent has ended
    workdir, test_command        /testbed; python -m pytest -rA -p no:cacheprovider

The tests run in a new container, with the folder as the agent left it; files of tests and `.git` are the image's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshrl.common import plugins
from meshrl.common.container_tasks import KEY, ContainerTask, path_below_root
from meshrl.contract.errors import UserError

READERS = "meshrl.trainer.data.readers"
COMMAND = "python -m pytest -rA -p no:cacheprovider"
PATCHED = re.compile(r"^(?:--- a|\+\+\+ b)/(\S+)", re.MULTILINE)
PATCH = re.compile(r"^(---|\+\+\+|diff --git) ", re.MULTILINE)
IMAGES = ("image_name", "docker_image", "image")
TEST = """#!/bin/bash
# Runs the files of the tests, and counts names whose test has passed.
apply() {{ patch -p1 --batch "$@" < /tests/test.patch 2>&1; }}
if [ -s /tests/test.patch ] && ! said=$(apply --forward) && ! apply -R --dry-run > /dev/null; then
    echo "test_patch cannot be applied: ${{said##*$'\\n'}}" > /logs/verifier/reward.txt
    exit
fi
mapfile -t files < /tests/files
{command} "${{files[@]}}" > /logs/verifier/test-stdout.txt 2>&1
share() {{
    local passed=0 all=0 name
    while IFS= read -r name; do
        all=$((all + 1))
        grep -qxF -- "PASSED $name" /logs/verifier/test-stdout.txt && passed=$((passed + 1))
    done < "$1"
    echo "$passed $all"
}}
read -r fixed to_fix <<< "$(share /tests/fail_to_pass)"
read -r kept to_keep <<< "$(share /tests/pass_to_pass)"
reward=0
[ "$fixed" = "$to_fix" ] && [ "$kept" = "$to_keep" ] && reward=1
echo "{{\\"reward\\": $reward, \\"fixed\\": $fixed, \\"to_fix\\": $to_fix, \\"kept\\": $kept,\\
 \\"to_keep\\": $to_keep}}" > /logs/verifier/reward.json
"""


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each task with the number of its row. Raises UserError, which names file, row and column."""
    source = plugins.load(READERS, path.suffix[1:], "read")
    return ((number, _row(path, f"{path}:{number}", values)) for number, values in source(path))


def _row(path: Path, where: str, values: dict[str, Any]) -> dict[str, Any]:
    fixed = _names(values, "FAIL_TO_PASS", where)
    kept = _names(values, "PASS_TO_PASS", where)
    if not fixed:
        raise UserError(f"{where}: FAIL_TO_PASS: no tests, want some that fail before the task")
    image = next((_text(values, key, where) for key in IMAGES if values.get(key)), "")
    snapshot = _text(values, "snapshot", where)
    if not image:
        raise UserError(f"{where}: no image; want one of {', '.join(IMAGES)}")
    if snapshot and not (path.parent / snapshot).is_file():
        raise UserError(f"{where}: snapshot: {path.parent / snapshot}: no such file")
    try:
        workdir = path_below_root(_text(values, "workdir", where) or "/testbed")
    except ValueError as error:
        raise UserError(f"{where}: workdir: {error}") from error
    command = _text(values, "test_command", where) or COMMAND
    patch = _text(values, "test_patch", where)
    if patch.strip() and not PATCH.search(patch):
        raise UserError(f"{where}: test_patch: {patch!r:.60}, want what `git diff` writes")
    files = sorted({name.partition("::")[0] for name in (*fixed, *kept)})
    tests = sorted({*files, *PATCHED.findall(patch)})
    if outside := [name for name in tests if name.startswith("/") or ".." in Path(name).parts]:
        raise UserError(f"{where}: {outside[0]!r:.60}, want files of tests below the repository")
    task = ContainerTask(
        name=_text(values, "instance_id", where) or where,
        image=image,
        workdir=workdir,
        unpack={workdir: str((path.parent / snapshot).resolve())} if snapshot else {},
        test_files={
            "test.sh": TEST.format(command=command),
            "test.patch": patch,
            "files": _lines(files),
            "fail_to_pass": _lines(fixed),
            "pass_to_pass": _lines(kept),
        },
        separate=True,
        artifacts=[workdir],
        kept=[f"{workdir}/{name}" for name in (".git", *tests)],
    )
    problem = _text(values, "problem_statement", where)
    if not problem.strip():
        raise UserError(f"{where}: problem_statement: no text, want the issue")
    return {
        "prompt": [{"role": "user", "content": problem}],
        "data_source": "swe",
        "extra_info": {KEY: task.model_dump(exclude_defaults=True)},
    }


def _text(values: dict[str, Any], key: str, where: str) -> str:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: {key}: {value!r:.60}, want text")
    return value or ""


def _names(values: dict[str, Any], key: str, where: str) -> list[str]:
    value = values.get(key)
    try:
        names = json.loads(value) if isinstance(value, str) else value or []
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where}: {key}: {value!r:.60}, want a list of tests")
    if broken := [name for name in names if "\n" in name or not name.strip()]:
        raise UserError(f"{where}: {key}: {broken[0]!r:.60}, want pytest's name of a test")
    return names


def _lines(names: list[str]) -> str:
    return "".join(f"{name}\n" for name in names)

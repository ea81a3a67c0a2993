"""The state of a run changes in `model/` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import meshrl.transferqueue.model
from meshrl.transferqueue.model.fair_share import Holder
from meshrl.transferqueue.model.group import Grant, Group
from meshrl.transferqueue.model.records import DeadRow, RunRecord, TakenBatch
from meshrl.transferqueue.model.run import Run

MODEL = Path(meshrl.transferqueue.model.__path__[0])
MODULES = sorted(MODEL.parent.rglob("*.py"))


def set_on_self(path: Path) -> Iterator[str]:
    """Attributes that the methods of a module's classes set on `self`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


STATE = {*dir(Run), *set_on_self(MODEL / "rows.py"), *set_on_self(MODEL / "run.py")}.union(
    *(each.__slots__ for each in (Group, Grant, TakenBatch, DeadRow, Holder, RunRecord))
)


def changes(path: Path) -> Iterator[str]:
    """Attributes of the model's classes, or items of them, that a module sets or deletes on others than `self`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            owner: ast.expr = node
            names: set[str] = set()
            while isinstance(owner, ast.Attribute | ast.Subscript):
                if isinstance(owner, ast.Attribute):
                    names.add(owner.attr)
                owner = owner.value
            of_self = isinstance(owner, ast.Name) and owner.id == "self"
            if names & STATE and not of_self:
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_no_module_outside_model_sets_state_of_a_run_or_group() -> None:
    paths = [path for path in MODULES if path.parent == MODEL.parent]
    assert paths
    assert [change for path in paths for change in changes(path)] == []


def test_the_check_finds_an_assignment() -> None:
    assert any(list(changes(path)) for path in MODULES if path.parent == MODEL)

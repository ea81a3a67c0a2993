"""`.ci/architecture.py` finds classes that are based on type aliases."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]

TYPES = """
from typing import TypeAlias
import numpy.typing as npt
Array: TypeAlias = npt.NDArray[int]
class Plain: ...
"""
PACKAGE = "from a.types import Array as Array, Plain as Plain"


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    specification = importlib.util.spec_from_file_location(
        "architecture", ROOT / ".ci/architecture.py"
    )
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "base"),
    [
        ("from a.types import Array\nclass Shared(Array): ...", "Array"),
        ("from a import Array as Held\nclass Shared(Held): ...", "Held"),
        ("from a import types\nclass Shared(types.Array): ...", "types.Array"),
        ("import a.types as t\nclass Shared(t.Array): ...", "t.Array"),
        ("import typing as t\nOwn: t.TypeAlias = dict\nclass Shared(Own): ...", "Own"),
        ("import numpy.typing as npt\nclass S(npt.NDArray[int]): ...", "npt.NDArray[int]"),
        ("from numpy import typing\nclass S(typing.NDArray[int]): ...", "typing.NDArray[int]"),
        ("from numpy.typing import NDArray\nclass S(NDArray[int]): ...", "NDArray[int]"),
        ("def f():\n from a.types import Array\n class Shared(Array): ...", "Array"),
        ("import numpy as np\nclass Shared(np.ndarray[int, int]): ...", None),
        ("from a import Plain\nclass Other(Plain): ...", None),
        ("from typing import Protocol\nclass Port(Protocol): ...", None),
        ("from a.types import Array\nclass Holds:\n array: Array", None),
        ("from b import b\nclass Own(b): ...", None),
    ],
)
def test_a_class_based_on_a_type_alias_is_found(
    architecture: ModuleType, source: str, base: str | None
) -> None:
    trees = {"a": ast.parse(PACKAGE), "a.types": ast.parse(TYPES), "b": ast.parse(source)}
    found = list(architecture.based_on_aliases(trees))
    assert [(module, named) for module, _, named in found] == ([("b", base)] if base else [])

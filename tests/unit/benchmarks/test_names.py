"""A script's folder comes first on its path: no benchmark has the name of a package that transformers looks for."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import import_utils

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_no_benchmark_is_taken_for_an_optional_package() -> None:
    optional = {name.removeprefix("is_").removesuffix("_available") for name in dir(import_utils)}
    assert "kernels" in optional
    assert not optional & {path.stem for path in BENCHMARKS.rglob("*.py")}

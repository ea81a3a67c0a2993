"""Stands for SGLang's CPU kernels, which no package index has: their names can be imported, not called."""

from collections.abc import Callable
from typing import Any


def missing(name: str) -> Callable[..., Any]:
    """A kernel that raises when it is called."""

    def call(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not built for this CPU")

    return call


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(name)

"""Tools for tests, by dotted path."""

from __future__ import annotations

import asyncio
import threading
from typing import Literal

from meshrl.contract.errors import InfraError
from meshrl.rollout.tools.ports import ToolCaller

calls: list[str] = []
hanging = threading.Event()


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    They may be negative.

    Args:
        a: The first.
        b (int): The second,
            if there is one.

    Returns:
        The sum.
    """
    calls.append(f"{a}+{b}")
    return a + b


async def slow_add(a: int, b: int) -> int:
    """Add two numbers, slowly."""
    await asyncio.sleep(0)
    return a + b


def odd(json: str, model_config: Literal["x", "y"] = "x", _hidden: int = 0) -> dict[str, object]:
    """Names that pydantic would not like."""
    return {"json": json, "model_config": model_config, "_hidden": _hidden}


def fail(how: str) -> None:
    """Fail."""
    match how:
        case "exit":
            raise SystemExit(3)
        case "stop":
            raise StopIteration
        case "infra":
            raise InfraError("the disk is gone")
        case "timeout":
            raise TimeoutError("the other side is slow")
        case _:
            raise ValueError(how)


def wait() -> str:
    """Wait until it is let go."""
    hanging.wait(30)
    return "at last"


async def wait_for_ever() -> None:
    """Never end."""
    await asyncio.Event().wait()


def long(n: int) -> str:
    """Say much."""
    return "".join(f"{i:07d} " for i in range(n))


def python(code: str) -> str:
    """Read code."""
    return f"read {code!r}"


def who(caller: ToolCaller, secret: str = "", guess: str = "") -> str:
    """Say who calls.

    Args:
        guess: What the secret may be.
    """
    return f"{caller.uid} {caller.task.task_id} {secret == guess}"


def untyped(a, b: int) -> int:  # type: ignore[no-untyped-def]
    """Has no hint."""
    return b


def many(*numbers: int) -> int:
    """Has no names."""
    return sum(numbers)


def strange(a: threading.Event) -> None:
    """Has a type without a schema."""


not_a_function = 3


def hanging_agent(base_url: str, api_key: str, task: object) -> float:
    hanging.wait(30)
    return 0.5


def scraped(x: str) -> str:
    """A page.

    Args:
        x: Anything.
    """
    return "bold \ud835 text"


def listed(x: str) -> str:
    """A file whose name is not UTF-8, as os.listdir gives it.

    Args:
        x: Anything.
    """
    return b"caf\xe9.txt".decode(errors="surrogateescape")


def written(x: str) -> dict[str, str]:
    """A value.

    Args:
        x: Anything.
    """
    return {"x": "\ud835"}


def raised(x: str) -> str:
    """An error.

    Args:
        x: Anything.
    """
    raise ValueError("bad \ud835")

"""Python functions as tools: type hints become the schema, a Google-style docstring the descriptions."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from typing_extensions import override

from meshrl.contract.errors import ConfigError, InfraError
from meshrl.contract.types import Json
from meshrl.rollout.tools.ports import NO_PICTURE, Pictured, Tool, ToolCaller, ToolError

PREFIX = "argument_"
"""Prefix of the pydantic model's fields: some parameter names are not allowed for fields."""
CALLER = "caller"
"""A parameter of this name gets the `ToolCaller`; the policy does not see it."""
_ARGUMENT = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class FunctionTool(Tool):
    """One function. Coroutine functions are awaited, each call of others runs in its own thread.

    A thread cannot be stopped: one that does not return is abandoned. After `most_lost` of them the tool is broken,
    and calls raise InfraError.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        stateful: bool = False,
        most_lost: int = 16,
        asks: str = "",
    ) -> None:
        """`asks` names the service that it waits for: one that is late is a fault, not an observation.

        Raises:
            ConfigError: no schema can describe the parameters.
        """
        self.name = name or function.__name__
        self.stateful = stateful
        self._function = function
        self._most_lost = most_lost
        self._asks = asks
        self._lost = 0
        signature = _signature(function, self.name)
        self._takes_caller = CALLER in signature
        signature.pop(CALLER, None)
        self.description, arguments = read_docstring(inspect.getdoc(function) or "")
        self._model = _model(self.name, signature, arguments)
        schema = self._model.model_json_schema()
        self.parameters: Mapping[str, Json] = _without_titles(schema)

    @override
    async def call(self, arguments: Mapping[str, Json], caller: ToolCaller) -> str | Pictured:
        try:
            checked = self._model.model_validate({**arguments, **caller.given})
        except ValidationError as error:
            raise ToolError(_first_fault(self.name, error)) from error
        values = {name[len(PREFIX) :]: getattr(checked, name) for name in checked.model_fields_set}
        if self._takes_caller:
            values[CALLER] = caller
        try:
            return as_said(await self._run(values))
        except (InfraError, ToolError, TimeoutError):
            raise
        except Exception as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error

    @override
    async def check(self, caller: ToolCaller) -> None:
        if self._asks:
            raise InfraError(f"{self._asks} does not answer in time")

    async def _run(self, values: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**values)
        if self._lost >= self._most_lost:
            raise InfraError(f"tool {self.name}: {self._lost} calls never returned")
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # A daemon thread: threads of a pool are joined at exit, and this one may never end.
        threading.Thread(
            target=self._work, args=(values, done), name=f"tool-{self.name}", daemon=True
        ).start()
        try:
            return await done
        finally:
            self._lost += done.cancelled()

    def _work(self, values: Mapping[str, Any], done: asyncio.Future[Any]) -> None:
        """Run one call in its thread."""
        result, error = None, None
        try:
            result = self._function(**values)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # `sys.exit()` in a tool ends the tool
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        if isinstance(error, StopIteration):
            error = RuntimeError("StopIteration")  # a future cannot hold it
        with contextlib.suppress(RuntimeError):  # the loop has ended
            done.get_loop().call_soon_threadsafe(self._settle, done, result, error)

    def _settle(self, done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        if done.cancelled():
            self._lost -= 1  # it returned after all
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)


def as_said(result: Any) -> str | Pictured:
    """A picture, or a list with some, as such; anything else as text."""
    parts = result if isinstance(result, list | tuple) else [result]
    pictures = tuple(part for part in parts if _is_picture(part))
    if not pictures:
        return as_text(result)
    texts = [NO_PICTURE if _is_picture(part) else as_text(part) for part in parts]
    return Pictured(text="\n".join(texts), pictures=pictures)


def _is_picture(result: Any) -> bool:
    """Bytes of a file, or a picture of Pillow."""
    return isinstance(result, bytes) or (hasattr(result, "save") and hasattr(result, "tobytes"))


def as_text(result: Any) -> str:
    """Text unchanged, None as empty text, anything else as JSON if possible, else by `str`."""
    if isinstance(result, str):
        return result
    if result is None:
        return ""
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The descriptions of the function and of each argument in a Google-style docstring."""
    body, _, rest = text.partition("\nArgs:\n")
    arguments: dict[str, str] = {}
    last = ""
    for line in rest.splitlines():
        if line and not line[0].isspace():
            break  # the next section
        indent = len(line) - len(line.lstrip())
        match = _ARGUMENT.match(line)
        if match and indent <= 4:
            last = match[1]
            arguments[last] = match[2]
        elif last and line.strip():
            arguments[last] += " " + line.strip()
    summary = re.split(r"\n(?:Returns|Raises|Yields|Examples?):\n", body)[0]
    return " ".join(summary.split()), arguments


def _signature(function: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    try:
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"tool {name}: its type hints cannot be read: {error}") from error
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool {name}: {parameter} has no schema; want named parameters")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"tool {name}: {parameter.name} cannot be given by name")
        if parameter.annotation is parameter.empty and parameter.name != CALLER:
            raise ConfigError(f"tool {name}: {parameter.name} has no type hint")
    return parameters


def _model(
    name: str, signature: Mapping[str, inspect.Parameter], described: Mapping[str, str]
) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for parameter in signature.values():
        default = ... if parameter.default is parameter.empty else parameter.default
        about = described.get(parameter.name)
        info = Field(default=default, alias=parameter.name, description=about)
        fields[PREFIX + parameter.name] = (parameter.annotation, info)
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except Exception as error:  # pydantic has several for types without a schema
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"tool {name}: no schema for its parameters: {reason}") from error


def _without_titles(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Remove pydantic's titles, which repeat the names and would lengthen the prompt."""
    kept: dict[str, Json] = {}
    for key, value in schema.items():
        if key == "title":
            continue
        if key in ("properties", "$defs"):
            # Its keys are names, of which one may be `title`.
            kept[key] = {name: _without_titles(each) for name, each in value.items()}
        elif isinstance(value, dict):
            kept[key] = _without_titles(value)
        else:
            kept[key] = value
    return kept


def _first_fault(name: str, error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    where = ".".join(map(str, fault["loc"]))
    return f"{name}: argument {where}: {fault['msg']}"

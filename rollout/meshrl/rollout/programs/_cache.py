"""The programs of a worker by name: loaded when the first row asks for one, built once, closed with the worker."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol, Self

from meshrl.contract import plugins
from meshrl.contract.errors import ConfigError
from meshrl.rollout.ports import Program
from meshrl.rollout.sessions.gateway import Gateway

PACKAGE = "meshrl.rollout.programs"


class ProgramBuilder(Protocol):
    """The `build` of a module in `meshrl.rollout.programs`: of programs with options, or that need a gateway."""

    def __call__(self, options: Mapping[str, object], *, gateway: Gateway | None) -> Program:
        """A program; its `start` and `aclose` are awaited where it has them. Raises ConfigError for wrong options."""
        ...


class ProgramCache:
    """ProgramCache by name. One that defines `build` is built with the recipe's options, any other is its `run`."""

    def __init__(
        self,
        name: str = "single_turn",
        options: Mapping[str, object] | None = None,
        *,
        gateway: Gateway | None = None,
    ) -> None:
        """`options` are those of the program `name`; any other is built without."""
        self._name = name
        self._options = options or {}
        self._gateway = gateway
        self._built: dict[str, Program] = {}

    def get(self, name: str) -> Program:
        """The program `name`.

        Raises:
            ConfigError: there is none, or its options are wrong.
        """
        if name not in self._built:
            self._built[name] = self._build(name)
        return self._built[name]

    async def start(self) -> Program:
        """The recipe's own program, ready, so that what is wrong with it is known before a row asks for it.

        Raises:
            ConfigError: as `get`.
        """
        program = self.get(self._name)
        start = getattr(program, "start", None)
        if start is not None:
            await start()
        return program

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close those that can be closed; idempotent."""
        built, self._built = self._built, {}
        for program in built.values():
            close = getattr(program, "aclose", None)
            if close is not None:
                await close()

    def _build(self, name: str) -> Program:
        module = importlib.import_module(plugins.load(PACKAGE, name, "__name__"))
        options = self._options if name == self._name else {}
        if hasattr(module, "build"):
            build: ProgramBuilder = module.build
            return build(options, gateway=self._gateway)
        if options:
            raise ConfigError(
                f"rollout.program_options: the program {name!r} takes none",
                key="rollout.program_options",
            )
        run: Program = plugins.load(PACKAGE, name, "run")
        return run

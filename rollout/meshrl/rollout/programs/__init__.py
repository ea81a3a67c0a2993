"""The programs that turn a task into a trajectory: one file each, named by `rollout.program`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Protocol, Self

from meshrl.common import plugins
from meshrl.contract.errors import ConfigError
from meshrl.rollout.agents.session import Gateway
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers.pool import Pool, build_backend
from meshrl.rollout.ports import Program

PROGRAMS = "meshrl.rollout.programs"


class ProgramBuilder(Protocol):
    """The `build` of a module in `meshrl.rollout.programs`, for programs with options or a gateway."""

    def __call__(self, options: Mapping[str, object], *, gateway: Gateway | None) -> Program:
        """A program; its `start` and `aclose` are awaited if it has them. Raises ConfigError for wrong options.

        Where the module has `BOXES = True`, it is given `boxes` too: the worker's `containers.pool.Pool`, started.
        """
        ...


class ProgramCache:
    """The programs of a worker by name: loaded with the first row that names one, built once, closed with the worker.

    A module with `build` is built with the recipe's options; of any other its `run` is used.
    """

    def __init__(
        self,
        name: str = "single_turn",
        options: Mapping[str, object] | None = None,
        *,
        gateway: Gateway | None = None,
        containers: ContainersConfig | None = None,
    ) -> None:
        """`options` are for the program `name`; other programs are built without options."""
        self._name = name
        self._options = options or {}
        self._gateway = gateway
        self._containers = containers or ContainersConfig()
        self.boxes: Pool | None = None
        """The containers of the recipe's program; None: it has none."""
        self._built: dict[str, Program] = {}
        self._external = False

    @property
    def demand(self) -> int | None:
        """How many external agents wait for a row, where they lead the rows; None: rows are always wanted."""
        return self._gateway.demand if self._gateway is not None and self._external else None

    def get(self, name: str) -> Program:
        """The program `name`.

        Raises:
            ConfigError: no such program, or wrong options; or it is neither known nor the recipe's own.
        """
        if name not in self._built:
            self._built[name] = self._build(name)
        return self._built[name]

    async def start(self) -> Program:
        """Start the recipe's own program, so that its errors appear before the first row.

        Raises:
            ConfigError: as `get`.
        """
        program = self.get(self._name)
        if self.boxes is not None:
            await self.boxes.start()
        start = getattr(program, "start", None)
        if start is not None:
            await start()
        self._external = getattr(program, "external", False)
        return program

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all programs that have `aclose`; idempotent."""
        built, self._built = self._built, {}
        for program in built.values():
            close = getattr(program, "aclose", None)
            if close is not None:
                await close()
        if self.boxes is not None:
            await self.boxes.close()

    def _build(self, name: str) -> Program:
        plugins.check_admitted(PROGRAMS, name, [self._name], "rollout.program")
        module = importlib.import_module(plugins.load(PROGRAMS, name, "__name__"))
        options = self._options if name == self._name else {}
        if hasattr(module, "build"):
            build: ProgramBuilder = module.build
            if getattr(module, "BOXES", False):
                self.boxes = self.boxes or Pool(build_backend(self._containers), self._containers)
                build = functools.partial(module.build, boxes=self.boxes)
            return build(options, gateway=self._gateway)
        if options:
            raise ConfigError(
                f"rollout.program_options: the program {name!r} takes none",
                key="rollout.program_options",
            )
        run: Program = plugins.load(PROGRAMS, name, "run")
        return run

"""The machines of one `up`: which service runs on which, and the command that starts it there.

Rollout workers run where the placement has GPUs for them; those without GPUs on all machines but the first, in turn,
if there are others. The trainer runs on the first ones, everything else on the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshrl.common.process_guard import DRAIN_AT_EOF, PARENT_VARIABLE
from meshrl.common.python_process import PYTHON
from meshrl.config.placement import Placement
from meshrl.config.recipe import Recipe, names
from meshrl.contract.errors import ConfigError, UserError

MACHINE = "{machine}"
PROGRAM = (*PYTHON, "meshrl.cli")
"""The command `meshrl` in a process that `up` starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines of one `up`, and the launcher that starts services there.

    Raises:
        UserError: a machine is named twice, or the launcher does not say to which one it goes.
    """

    names: tuple[str, ...]
    """Names by which they reach each other. `up` itself need not run on any of them."""
    launcher: tuple[str, ...]
    """Words before a service's command, `{machine}` among them. The launcher passes its standard input on, ends the
    command at SIGINT, and ends with its exit code: `srun` with `--quit-on-interrupt` does."""
    program: tuple[str, ...] = PROGRAM
    """The command `meshrl` there."""

    def __post_init__(self) -> None:
        if not all(self.names) or len(set(self.names)) < len(self.names) or not self.names:
            raise UserError(f"--machines: {','.join(self.names)!r}: want different names: n1,n2")
        if not any(MACHINE in word for word in self.launcher):
            raise UserError(
                f"--launcher: {' '.join(self.launcher)!r} does not say where {MACHINE} goes:"
                " want e.g. 'srun --nodelist={machine}'"
            )

    def prepared(self, recipe: Recipe) -> Recipe:
        """The recipe with the address at which workers find the trainer, unless it names one.

        Raises:
            ConfigError: `placement.machines` names others; the trainer has more machines than there are.
        """
        placed = tuple(recipe.placement.machines)
        if placed and placed != self.names:
            raise ConfigError(
                f"placement.machines: {', '.join(placed)}; want those of --machines, in this order:"
                f" {', '.join(self.names)}"
            )
        if recipe.trainer.nnodes > len(self.names):
            raise ConfigError(
                f"trainer.nnodes: {recipe.trainer.nnodes}, and there are {len(self.names)} machines:"
                f" {', '.join(self.names)}"
            )
        if len(self.names) == 1 or names(recipe.weights, "host"):
            return recipe
        weights = recipe.weights.model_copy(update={"host": self.names[0]})
        return recipe.model_copy(update={"weights": weights})

    def machine_of(self, service: str, kind: str, placement: Placement | None) -> str:
        """The machine of a service."""
        place = placement.places.get(service) if placement is not None else None
        if place is not None and place.host.name in self.names:
            return place.host.name
        if kind == "trainer" and service != kind:
            return self.names[int(service.rpartition("-")[2])]
        if kind != "rollout" or (placement is not None and placement.worker_gpus):
            return self.names[0]
        others = self.names[1:] or self.names
        return others[int(service.rpartition("-")[2]) % len(others)]

    def command(
        self, machine: str, words: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[str, ...]:
        """The command of `meshrl WORDS` on `machine`; variables are words of it, so that no launcher changes them."""
        return (
            *(word.replace(MACHINE, machine) for word in self.launcher),
            "env",
            "-u",
            PARENT_VARIABLE,
            f"{DRAIN_AT_EOF}=1",
            *(f"{name}={value}" for name, value in environment.items()),
            *self.program,
            *words,
        )

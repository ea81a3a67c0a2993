"""The stages of a run: which columns each one writes, and which stages come before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.contract.errors import UserError
from meshrl.contract.types import NOTES, StageSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage; `number` is its index in every list that has an entry per stage."""

    number: int
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    after: tuple[int, ...]
    """Numbers of the stages that write what this one reads."""
    first: bool
    """It reads nothing: it samples, so it follows the policy's version."""


class Stages:
    """All stages of a run; the constructor checks them.

    Raises:
        UserError: names the stage and the column that are wrong.
    """

    def __init__(self, specs: Sequence[StageSpec]) -> None:
        self._of_column: dict[str, int] = {}
        for number, spec in enumerate(specs):
            for column in spec.writes:
                if column in self._of_column:
                    other = specs[self._of_column[column]].name
                    raise UserError(f"column {column} is written by {other} and by {spec.name}")
                self._of_column[column] = number
        for number, spec in enumerate(specs):
            for column in NOTES.get(spec.name, ()):
                self._of_column.setdefault(column, number)
        self._by_name: dict[str, Stage] = {}
        for number, spec in enumerate(specs):
            self._check(spec, number)
            after = tuple(sorted({self._of_column[column] for column in spec.reads}))
            self._by_name[spec.name] = Stage(
                number, spec.name, spec.reads, spec.writes, after, first=not spec.reads
            )
        self.ordered = tuple(self._by_name.values())
        """By stage number."""
        self.writes = tuple(stage.writes for stage in self.ordered)
        """By stage number: the columns that it writes."""
        if not any(stage.first for stage in self.ordered):
            raise UserError("a run needs a stage that reads nothing: the one that samples")

    def _check(self, spec: StageSpec, number: int) -> None:
        if spec.name in self._by_name:
            raise UserError(f"two stages are named {spec.name}")
        if not spec.writes:
            raise UserError(f"stage {spec.name} writes no column")
        for column in spec.reads:
            writer = self._of_column.get(column)
            if writer is None or writer >= number:
                raise UserError(
                    f"stage {spec.name} reads {column}, which no earlier stage writes"
                    f" (written before it: {', '.join(self._written_before(number)) or 'nothing'})"
                )

    def _written_before(self, number: int) -> list[str]:
        return [column for column, writer in self._of_column.items() if writer < number]

    def get(self, name: str) -> Stage | None:
        """The stage with this name, if the run has it."""
        return self._by_name.get(name)

    def __getitem__(self, name: str) -> Stage:
        stage = self._by_name.get(name)
        if stage is None:
            raise UserError(f"no stage named {name!r} (the run has {', '.join(self._by_name)})")
        return stage

    def depending_on(self, stage: Stage) -> set[int]:
        """Numbers of `stage` and of all stages that read what it writes, directly or not."""
        numbers = {stage.number}
        for other in self.ordered[stage.number + 1 :]:
            if numbers & set(other.after):
                numbers.add(other.number)
        return numbers

    def of_columns(self, columns: Sequence[str]) -> list[Stage]:
        """The stages that write `columns`, each once.

        Raises:
            UserError: no stage of the run writes one of the columns.
        """
        for column in columns:
            if column not in self._of_column:
                raise UserError(
                    f"no stage of the run writes column {column!r}"
                    f" (columns: {', '.join(self._of_column)})"
                )
        return [self.ordered[n] for n in sorted({self._of_column[name] for name in columns})]

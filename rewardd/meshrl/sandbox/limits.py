"""Limits of one scoring process. A submitted function may ask for lower ones."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import pydantic
from pydantic import PositiveFloat, PositiveInt

from meshrl.common.config import Config
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Json


class ScoringLimits(Config):
    """The limits of a scoring process that a recipe sets: `reward.limits`."""

    deadline_s: PositiveFloat = 10.0
    """Wall-clock seconds of one sample (of one call, for a batch function); then its process is killed."""
    memory_bytes: PositiveInt | None = 1 << 30
    """Address space of each process (RLIMIT_AS); null: no limit. A sandbox can use `processes` times as much."""
    processes: PositiveInt | None = 8
    """Processes and threads of one sandbox together (RLIMIT_NPROC); null: no limit."""


class Limits(ScoringLimits):
    """Limits of a scoring process and of one sample in it."""

    cpu_s: PositiveInt | None = None
    """CPU seconds of one sample (RLIMIT_CPU), whole seconds; null: only the wall clock counts."""
    start_deadline_s: PositiveFloat = 30.0
    """Seconds that a process may take to import the function."""
    open_files: PositiveInt | None = 64
    """File descriptors of each process (RLIMIT_NOFILE); null: no limit."""
    tmp_bytes: PositiveInt | None = 64 << 20
    """Size of the private /tmp, and of each file (RLIMIT_FSIZE); null: no limit."""
    output_bytes: PositiveInt | None = 8 << 20
    """Bytes that a process may print between two answers; it is killed beyond that. null: no limit."""

    def bounded(self, asked: Mapping[str, Json]) -> Limits:
        """These limits, replaced where a submission asks for lower ones.

        Raises:
            ConfigError: a limit that does not exist, is no number, or exceeds the bound.
        """
        for name in asked:
            if name not in Limits.model_fields:
                near = difflib.get_close_matches(name, Limits.model_fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"no limit {name!r}{hint} (known: {', '.join(Limits.model_fields)})"
                )
        try:
            limits = Limits.model_validate({**self.model_dump(), **asked})
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"limit {'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from error
        for name in asked:
            bound, value = getattr(self, name), getattr(limits, name)
            if bound is not None and (value is None or value > bound):
                raise ConfigError(
                    f"limit {name} = {value} exceeds what the operator allows ({bound})"
                )
        return limits

"""Checks of the `rollout` section: options of engine and program, and how an engine samples."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from meshrl.common import plugins
from meshrl.common.checks import Problem, check_options
from meshrl.common.config import Machine, read_options
from meshrl.contract.errors import ConfigError
from meshrl.rollout.config import RolloutConfig

PROGRAMS = "meshrl.rollout.programs"
ENGINES = "meshrl.rollout.engines"


def check_rollout(rollout: RolloutConfig, machine: Machine, model: Path) -> Iterator[Problem]:
    """Every problem of the section."""
    yield from _program_options(rollout, machine, model)
    yield from check_options(
        ("rollout", "engine"), ENGINES, rollout.name, rollout.engine, machine, model
    )
    yield from _cuts(rollout)


def _program_options(rollout: RolloutConfig, machine: Machine, model: Path) -> Iterator[Problem]:
    """Those of the mesh's own programs, which are light to import; what they name is loaded by a worker."""
    name, options = rollout.program, rollout.program_options
    if name not in plugins.known(PROGRAMS):
        return
    program, key = importlib.import_module(f"{PROGRAMS}.{name}"), "rollout.program_options"
    if not hasattr(program, "Config"):
        if options:
            yield ("rollout", "program_options"), f"{key}: the program {name!r} takes none"
        return
    try:
        config = read_options(program.Config, options, where=key)
        if hasattr(program, "check"):
            program.check(config)
        faults = getattr(config, "faults", None)
        for option, text in faults(machine, model) if faults else ():
            yield ("rollout", "program_options", *option.split(".")), f"{key}.{option}: {text}"
    except ConfigError as error:
        yield ("rollout", "program_options"), str(error)


def _cuts(rollout: RolloutConfig) -> Iterator[Problem]:
    """Where top_k and top_p cut together, the engine must cut as the recipe says."""
    asked = [rollout.sampling(max_tokens=1, seed=0), rollout.val_sampling(max_tokens=1, seed=0)]
    twice = next((sampling for sampling in asked if sampling.cuts_twice), None)
    kind = plugins.config_class(ENGINES, rollout.name)
    joint = bool(getattr(kind, "joint_cut", False))
    if twice is not None and kind is not None and twice.joint_cut != joint:
        rule = "of the whole distribution" if joint else "of what top_k has left"
        yield (
            ("rollout", "top_k_top_p"),
            f"rollout.top_k_top_p: top_k {twice.top_k} with top_p {twice.top_p}: {rollout.name} takes top_p {rule};"
            f" want {'joint' if joint else 'sequential'} to accept that, or one of the two alone",
        )

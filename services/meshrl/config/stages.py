"""The services of a mesh and the stages of its runs: what each kind declares, and what follows from a recipe.

The built-in kinds are declared in `meshrl.launcher.kinds` and run by the modules of `meshrl.launcher.services`. A
recipe adds its own under `stages`, by dotted path: a module with a `SERVICE` (a `ServiceKind`) and `async def
run(recipe, context)`. The columns of a run, the plan of `meshrl up`, `meshrl serve` and the checks of a recipe all
read the declarations. Every service that opens the run imports them, so such a module imports gRPC, torch and the
like inside `run`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from meshrl.common import plugins
from meshrl.common.checks import Loc, Problem
from meshrl.common.config import Config, read_options
from meshrl.config.machine import ThisMachine
from meshrl.config.recipe import EVAL_SUFFIX, Recipe, group_rows, groups_taken
from meshrl.contract.errors import ConfigError
from meshrl.contract.row_values import ANY_TOKEN
from meshrl.contract.types import RunSpec, StageSpec
from meshrl.transferqueue.model.specs import Quota

SERVICES = "meshrl.launcher.services"
KINDS = "meshrl.launcher.kinds"
TINKER = "tinker"
"""The kind that is a run of its own."""
BUILT_IN = ("queue", "rollout", "reward", "reference", "trainer", "feeder", TINKER)
"""The kinds that every recipe may have, in an order that is stored with a run: its stages follow it."""

LONGEST_LOAD_S = 900.0
MOST_EVALUATED = 1 << 20
"""Held-out prompts of one evaluation that the queue may hold."""

C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns that a stage reads and adds: it leases rows that have all of `reads` and none of `writes`."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


ColumnsOf: TypeAlias = Callable[[Recipe, bool], Columns | None]
"""Maps a recipe, and whether the run is the evaluation's, to columns; None if the run has no such stage."""


def loads_a_model(recipe: Recipe) -> float:
    """Reading a large checkpoint, from a network disk at worst, and the first compilation."""
    return LONGEST_LOAD_S


def always(recipe: Recipe) -> bool:
    """Whatever the recipe says."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceKind:
    """The declaration of a kind of service, which the mesh reads before it runs one."""

    sections: tuple[str, ...] = ()
    """Sections of the recipe whose files it opens; those of the others may be on other machines."""
    columns: Columns | ColumnsOf | None = None
    """Columns of a stage. Fixed ones are those of the training run; an evaluation does not have the stage."""
    count: Callable[[Recipe], int | None] = lambda recipe: None
    """How many processes, named `<kind>-0` and so on; None is one process, named as its kind."""
    machines: Callable[[Recipe], int] = lambda recipe: 1
    """On how many machines one process is continued: the others' parts are named `<kind>-1` and so on."""
    ranks: Callable[[Recipe], int] = lambda recipe: 1
    """Ranks on all machines; above 1 a process starts those of its machine, which run the service."""
    needs_torch: Callable[[Recipe], bool] = lambda recipe: False
    """Whether it imports torch, which `up` then imports for all such services at once."""
    ready_s: Callable[[Recipe], float] = lambda recipe: 300.0
    """How long a start may take, in seconds, before it counts as failed."""
    start_order: int = 1
    """`up` starts those of the same number together, once all of the lower numbers are ready."""
    drain_order: int = 1
    """The lowest drains first."""
    drain_s: float = 30.0
    """How long a drain may take before the process is killed."""
    finite: bool = False
    """True: it ends by itself when its work is done."""
    leads: bool = False
    """True: when it is done, the run is done."""
    removable: bool = False
    """True: one of several may be drained while the run continues."""
    cannot_restart: Callable[[Recipe], str] = lambda recipe: ""
    """Why it must not be started again after a crash; empty where it may."""
    crash_at_start: Callable[[Recipe], str] = lambda recipe: ""
    """Why it would crash again where it crashed before it was ready; empty where it may not."""

    def columns_of(self, recipe: Recipe, *, evaluation: bool) -> Columns | None:
        """The columns in one of the recipe's runs; None for what is no stage of it."""
        if callable(self.columns):
            return self.columns(recipe, evaluation)
        return None if evaluation else self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshService:
    """One process of a mesh."""

    name: str
    kind: str
    rules: ServiceKind = field(repr=False)


def module_of(recipe: Recipe, kind: str) -> str:
    """The module of a kind, as `plugins.load` takes it."""
    return recipe.stages[kind].kind if kind in recipe.stages else kind


def service_kind(recipe: Recipe, kind: str) -> ServiceKind:
    """A kind's declaration. Raises ConfigError where the recipe has no such kind, or its module declares nothing."""
    if kind not in (*BUILT_IN, *recipe.stages):
        known = ", ".join((*BUILT_IN, *recipe.stages))
        raise ConfigError(f"no service named {kind!r} (this recipe has {known})")
    rules = _declared(module_of(recipe, kind))
    if not isinstance(rules, ServiceKind):
        raise ConfigError(
            f"SERVICE of {module_of(recipe, kind)!r} is no ServiceKind: {rules!r:.60}"
        )
    return rules


def _declared(module: str) -> object:
    built_in: Mapping[str, ServiceKind] = importlib.import_module(KINDS).KINDS
    return built_in.get(module) or plugins.load(SERVICES, module, "SERVICE")


def options_class(module: str) -> type[Config] | None:
    """The `Config` of a kind's module, if it takes options. Raises ConfigError for no module."""
    _declared(module)
    if module in BUILT_IN:
        return None
    try:
        kind = plugins.load(SERVICES, module, "Config")
    except ConfigError:
        return None
    return kind if isinstance(kind, type) and issubclass(kind, Config) else None


def stage_options(recipe: Recipe, name: str, kind: type[C]) -> C:
    """The options of the recipe's stage `name`. Raises ConfigError, naming the key that is wrong."""
    return read_options(kind, recipe.stages[name].options, where=f"stages.{name}.options")


def stage_specs(recipe: Recipe, *, evaluation: bool = False) -> tuple[StageSpec, ...]:
    """The stages of the training run or of the evaluation's, each after those whose columns it reads.

    Raises:
        ConfigError: a module that cannot be loaded, or a stage after one that the run does not have.
    """
    specs: dict[str, StageSpec] = {}
    for name in (*BUILT_IN, *recipe.stages):
        columns = service_kind(recipe, name).columns_of(recipe, evaluation=evaluation)
        if columns is None:
            continue
        reads = dict.fromkeys(columns.reads)
        for earlier in recipe.stages[name].after if name in recipe.stages else ():
            if earlier not in specs:
                raise ConfigError(
                    f"stages.{name}.after: the run has no stage {earlier!r} before this one"
                    f" (it has {', '.join(specs)})"
                )
            reads |= dict.fromkeys(specs[earlier].writes)
        specs[name] = StageSpec(name=name, reads=tuple(reads), writes=columns.writes)
    return tuple(specs.values())


def check_stages(recipe: Recipe) -> Iterator[Problem]:
    """The recipe's own stages: their modules, names and options, and that each reads what an earlier one writes."""
    broken = False
    for name, stage in recipe.stages.items():
        at: Loc = ("stages", name)
        if name in BUILT_IN:
            yield at, f"stages.{name}: {name} is a service of every mesh; want another name"
            broken = True
            continue
        try:
            kind = options_class(stage.kind)
            service_kind(recipe, name)
        except ConfigError as error:
            yield (*at, "kind"), f"stages.{name}.kind: {error}"
            broken = True
            continue
        if kind is None and stage.options:
            yield (*at, "options"), f"stages.{name}.options: {stage.kind} takes none"
        elif kind is not None:
            try:
                stage_options(recipe, name, kind)
            except ConfigError as error:
                yield (*at, "options"), str(error)
    if recipe.stages and not broken:
        yield from _columns(recipe)


def _columns(recipe: Recipe) -> Iterator[Problem]:
    try:
        specs = stage_specs(recipe)
    except ConfigError as error:
        yield ("stages",), str(error)
        return
    writers: dict[str, str] = {}
    for spec in specs:
        at: Loc = ("stages", spec.name)
        for column in spec.reads:
            if column not in writers:
                has = ", ".join(writers)
                yield (
                    at,
                    f"stages.{spec.name}: no earlier stage writes {column!r}; they write {has}",
                )
        for column in spec.writes:
            if column in writers:
                yield at, f"stages.{spec.name}: {writers[column]} writes {column!r} already"
        writers |= dict.fromkeys(spec.writes, spec.name)


def mesh_services(recipe: Recipe) -> list[MeshService]:
    """Every process of the mesh, in the order of its start; of one `start_order`, what ends by itself comes last."""
    services = list(_services(recipe))
    return sorted(services, key=lambda service: (service.rules.start_order, service.rules.finite))


def _services(recipe: Recipe) -> Iterator[MeshService]:
    mesh = (*BUILT_IN[: BUILT_IN.index(TINKER)], *recipe.stages)
    for kind in mesh if recipe.tinker is None else (TINKER,):
        rules = service_kind(recipe, kind)
        if rules.columns is not None and rules.columns_of(recipe, evaluation=False) is None:
            continue
        count = recipe.stages[kind].workers if kind in recipe.stages else rules.count(recipe)
        names = [f"{kind}-{index}" for index in range(count or rules.machines(recipe))]
        if count is None:
            names[0] = kind
        yield from (MeshService(name=name, kind=kind, rules=rules) for name in names)


def train_spec(recipe: Recipe) -> RunSpec:
    """The training run's spec for the queue. Every service opens it, so start order does not matter."""
    return recipe.queue.run_spec(
        recipe.run.name,
        group_size=group_rows(recipe),
        batch_groups=groups_taken(recipe),
        stages=stage_specs(recipe),
        vocabulary=vocabulary(recipe),
    )


def vocabulary(recipe: Recipe, machine: ThisMachine | None = None) -> int:
    """How many tokens the policy knows; 0 where its checkpoint is on other machines, or does not say it."""
    config = (machine or ThisMachine()).json(recipe.model.path / "config.json")
    size = (config.get("text_config") or config).get("vocab_size")
    return size if isinstance(size, int) and 0 < size <= ANY_TOKEN else 0


def eval_spec(recipe: Recipe) -> RunSpec:
    """The evaluation's spec for the queue: a run of its own, ahead of training, bound to no version.

    It may hold as many prompts as the queue allows: an evaluation admits all of its own at once, where they fit.
    """
    rows, answers = Quota().resident_rows, recipe.rollout.val_kwargs.n
    return RunSpec(
        run=recipe.run.name + EVAL_SUFFIX,
        group_size=answers,
        batch_groups=1,
        max_staleness=math.inf,
        stages=stage_specs(recipe, evaluation=True),
        max_attempts=recipe.queue.max_attempts,
        lease_ttl_s=recipe.queue.lease_ttl_s,
        resident_batches=max(1, min(MOST_EVALUATED, rows // answers)),
        resident_bytes=recipe.queue.resident_bytes,
        gated=False,
        priority=1,
        vocabulary=vocabulary(recipe),
    )

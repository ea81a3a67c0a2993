"""Checkpoints that are complete or absent: torch DCP tensors and a state.json, renamed into place.

    .epoch                 who may write here: the trainer that has the run
    .writing-…/            tensors/ (DCP: models, optimizers), state.json (hash of every file), all fsynced
    step-00000040-epoch-0001/   the same, after one rename

A kill at any moment leaves the last good one; leftovers are ignored and swept. Directories are ordered by Version,
epoch first: what a trainer that resumed at step 10 has written is newer than its predecessor's step 20.

    writer      make .writing-… ──▶ read .epoch: another? then end ──▶ write ──▶ rename
    successor   write its .epoch ──▶ remove every .writing-… ──▶ look what there is, and start from it

Whichever comes first, a predecessor that counts as dead puts nothing in place after its successor has looked. Every
machine of a run must see at once what the others change in the folder.

There is no scheduler and no RNG state in a checkpoint: the learning rate is a pure function of the step, and the
draws of a step are seeded by (seed, step, rank). `async_checkpointer.py` writes the copies of `freeze` beside
training.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from meshrl.common.files import replace_file, sync
from meshrl.contract.errors import CapacityError, CorruptError, FencedError, InfraError, UserError
from meshrl.contract.types import Json, Version
from meshrl.trainer.checkpoint.dcp import (
    SafePlanner,
    SafeReader,
    Tensors,
    copied,
    fill,
    tensors_of,
    write_tensors,
)
from meshrl.trainer.checkpoint.kept import Keep, name_of, version_of
from meshrl.trainer.learner.optimizer import Optimizers, Trained
from meshrl.trainer.model.policy import Policy
from meshrl.trainer.ranks.world import World

log = logging.getLogger(__name__)
_WRITER = re.compile(r"__(\d+)_\d+\.distcp$")
_WRITING = ".writing-"
_REMOVING = ".removing-"
_EPOCH = ".epoch"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The state of a run besides its tensors."""

    run: str
    step: int
    """Optimizer steps done: the policy is Version(epoch, step). Also the position in the queue's ledger: rows settled
    at steps before it are in these weights."""
    epoch: int
    seed: int
    world_size: int
    kl_coef: float
    """The KL controller's coefficient."""
    rows_trained: int = 0
    tokens_trained: int = 0
    beside: tuple[str, ...] = ()
    """Names of the models that were trained beside the policy; `describe` writes it."""
    adapter: dict[str, Json] | None = None
    """The policy's LoRA settings: then the checkpoint holds adapters only. `describe` writes it."""
    unsettled: tuple[str, ...] = ()
    """Takes of the last step that are in these weights although the queue has not heard of it; `resume` tells it."""


class Checkpoints(Protocol):
    """Interface of a trainer's checkpoints; this module is the default."""

    def describe(
        self, state: TrainerState, policy: Policy, beside: Mapping[str, Trained] | None = None
    ) -> TrainerState:
        """`state` with the names of the models whose tensors are saved with it."""
        ...

    def freeze(
        self, policy: Policy, optimizers: Optimizers, beside: Mapping[str, Trained] | None = None
    ) -> Tensors:
        """A copy of what a checkpoint holds."""
        ...

    def write(
        self, root: Path, tensors: Tensors, state: TrainerState, world: World, *, keep: Keep
    ) -> Path:
        """One checkpoint, durable on return."""
        ...

    def load(
        self,
        path: Path,
        policy: Policy,
        optimizers: Optimizers | None = None,
        *,
        beside: Mapping[str, Trained] | None = None,
    ) -> TrainerState:
        """Fill the models from a checkpoint."""
        ...

    def newest(self, root: Path, world: World | None = None) -> tuple[Path, TrainerState] | None:
        """The newest undamaged checkpoint, the same on every rank."""
        ...

    def complete(self, root: Path) -> Iterator[tuple[Version, Path]]:
        """Complete checkpoints, newest first."""
        ...

    def take_over(self, root: Path, epoch: int) -> None:
        """Let only a trainer of `epoch` put checkpoints in place from now on."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a checkpoint that no trainer starts from."""
        ...


def save(
    root: Path,
    policy: Policy,
    optimizers: Optimizers,
    state: TrainerState,
    world: World,
    *,
    keep: int,
    beside: Mapping[str, Trained] | None = None,
) -> Path:
    """Write one checkpoint as it is now, `keep` at most; otherwise as `write`.

    `beside`: models that are trained beside the policy, such as the critic, by name.
    """
    state = describe(state, policy, beside)
    tensors = tensors_of(policy, optimizers, beside or {})
    return write(root, tensors, state, world, keep=Keep(newest=keep))


def describe(
    state: TrainerState, policy: Policy, beside: Mapping[str, Trained] | None = None
) -> TrainerState:
    """`state` with the names of the models whose tensors are saved with it."""
    return dataclasses.replace(state, beside=tuple(sorted(beside or {})), adapter=policy.adapter)


def freeze(
    policy: Policy, optimizers: Optimizers, beside: Mapping[str, Trained] | None = None
) -> Tensors:
    """A copy of what a checkpoint holds, on the CPU: training may continue while `write` reads it.

    Costs memory for one more model and optimizer on each rank (its shards of them). Every rank calls this.
    """
    frozen: Tensors = copied(tensors_of(policy, optimizers, beside or {}))
    return frozen


def write(root: Path, tensors: Tensors, state: TrainerState, world: World, *, keep: Keep) -> Path:
    """Write tensors and state as one checkpoint; durable on return. Every rank calls this.

    Args:
        root: Directory of the run's checkpoints.
        tensors: Result of `freeze`.
        state: Everything that is no tensor.
        world: The ranks; off the thread that computes, with a group of its own (`World.with_own_group`).
        keep: Which checkpoints stay.

    Returns:
        The checkpoint's directory.

    Raises:
        CapacityError: the disk is full; the checkpoints before this one are as they were.
        FencedError: another trainer has taken the run over; on rank 0.
        InfraError: it cannot be written for another reason: a rank is gone, another trainer removed it.
    """
    what = f"the checkpoint of step {state.step}"
    try:
        return _write(root, tensors, state, world, keep)
    except CheckpointException as error:  # DCP's, of one rank or several
        first = next(cause for cause, _ in error.failures.values())
        raise _failed(root, what, first) from error
    except OSError as error:
        raise _failed(root, what, error) from error


def _failed(root: Path, what: str, error: BaseException) -> Exception:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"no space left in {root} for {what}; free some and start again")
    return InfraError(f"cannot write {what} in {root}: {error}")


def _write(root: Path, tensors: Tensors, state: TrainerState, world: World, keep: Keep) -> Path:
    final = root / name_of(Version(state.epoch, state.step))
    writing = root / f"{_WRITING}{final.name}"
    if world.is_main:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root, before=state.epoch + 1)
        writing.mkdir()
        _check_owner(root, state.epoch, writing)
    world.barrier()
    write_tensors(writing / "tensors", tensors, world)
    files = _hash_together(writing, world)
    if world.is_main:
        record = {"state": dataclasses.asdict(state), "files": files}
        (writing / "state.json").write_text(json.dumps(record, indent=1, sort_keys=True))
        for path in (writing / "state.json", writing / "tensors", writing):
            sync(path)
        if final.exists():  # the same Version: the same weights, already durable
            shutil.rmtree(writing)
        else:
            writing.rename(final)
            sync(root)
        paths = dict(complete(root))
        for version in keep.drops(list(paths)):
            remove(paths[version])
    world.barrier()
    return final


def load(
    path: Path,
    policy: Policy,
    optimizers: Optimizers | None = None,
    *,
    beside: Mapping[str, Trained] | None = None,
) -> TrainerState:
    """Fill the model (and optimizer) from a checkpoint; any world size reads what any other wrote.

    Args:
        path: The checkpoint; `newest` or `read_state` has compared its hashes.
        policy: The model to fill.
        optimizers: Its optimizer; None leaves that out.
        beside: The other models to fill, by name; what else the checkpoint has is left out.

    Raises:
        CorruptError: the directory is not what was written.
        UserError: it has no such other model, or another adapter.
    """
    state, beside = peek(path), beside or {}
    missing = sorted(set(beside) - set(state.beside))
    if missing:
        raise UserError(
            f"checkpoint {path} was written without a {missing[0]}, and the recipe's algorithm trains one:"
            " start a run with another name"
        )
    _check_adapter(path, state.adapter, policy.adapter)
    for each in (optimizers, *(other.optimizers for other in beside.values())):
        if each is not None:
            each.start_states()
    tensors = tensors_of(policy, optimizers, beside)
    reader = SafeReader(path / "tensors")
    reader.read_metadata()  # DCP reads it too, and drops what is raised
    state_dict_loader.load(tensors, storage_reader=reader, planner=SafePlanner())
    fill(policy, optimizers, tensors)
    for name, other in beside.items():
        fill(other.model, other.optimizers, tensors[name])
    return state


def peek(path: Path) -> TrainerState:
    """The state that a checkpoint records, without a check of its files.

    Raises:
        CorruptError: it cannot be read.
    """
    return _facts(path)[0]


def read_state(path: Path, world: World | None = None) -> TrainerState:
    """The state of a checkpoint, after every file's hash was compared; each rank of `world` reads its share of them.

    Every rank calls this, and gets the same answer.

    Raises:
        CorruptError: a file is missing or differs.
    """
    problem = ""
    try:
        state, files = _facts(path)
        problem = _damage(path, {n: d for n, d in files.items() if _is_own(n, world)})
    except CorruptError as error:
        problem = str(error)
    if found := next(filter(None, _gathered(problem, world)), ""):
        raise CorruptError(found)
    return state


def _damage(path: Path, expected: Mapping[str, str]) -> str:
    """First damage to the files of `expected`, file name to hash; empty if there is none."""
    for name, digest in expected.items():
        try:
            present = hash_of(path / name)
        except FileNotFoundError:
            return f"checkpoint {path}: {name} is missing beside what state.json says"
        if present != digest:
            return f"checkpoint {path}: {name} differs from what state.json says"
    return ""


def _facts(path: Path) -> tuple[TrainerState, dict[str, str]]:
    try:
        record = json.loads((path / "state.json").read_text())
        stored = record["state"]
        tuples = {name: tuple(stored.get(name, ())) for name in ("beside", "unsettled")}
        state = TrainerState(**{**stored, **tuples})
        files: dict[str, str] = record["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"checkpoint {path}: unreadable state.json ({error})") from error
    return state, files


def newest(root: Path, world: World | None = None) -> tuple[Path, TrainerState] | None:
    """The newest undamaged checkpoint; damaged ones are logged and skipped.

    Every rank of `world` calls this, reads its share of the files, and gets the same answer.
    """
    names = [path.name for _, path in complete(root)]
    if world is not None:  # rank 0's: a checkpoint may appear between two looks
        names = json.loads(world.broadcast(json.dumps(names).encode()))
    for name in names:
        try:
            return root / name, read_state(root / name, world)
        except CorruptError as error:
            log.warning("%s; trying the one before", error)
    return None


def complete(root: Path) -> Iterator[tuple[Version, Path]]:
    """Complete checkpoints, newest first."""
    found = ((version_of(path.name), path) for path in root.iterdir()) if root.is_dir() else ()
    yield from sorted(((version, path) for version, path in found if version), reverse=True)


def take_over(root: Path, epoch: int) -> None:
    """Let only a trainer of `epoch` put checkpoints in place from now on; remove unfinished ones.

    A predecessor that counts as dead and still writes ends with an error, whether it has begun by now or not.

    Raises:
        CapacityError: the disk is full.
        InfraError: the folder cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        replace_file(root / _EPOCH, str(epoch))
        _sweep(root)
    except OSError as error:
        raise _failed(root, f"the number of epoch {epoch}", error) from error


def _check_owner(root: Path, epoch: int, writing: Path) -> None:
    """Raise FencedError if another epoch has the checkpoints; a later owner removes `writing`."""
    try:
        owner = (root / _EPOCH).read_text()
    except FileNotFoundError:  # training without a queue: nobody takes over
        return
    if owner != str(epoch):
        writing.rmdir()
        raise FencedError(f"{root}: epoch {epoch} is fenced, epoch {owner} has the checkpoints")


def _sweep(root: Path, *, before: float = math.inf) -> None:
    """Remove what killed writers have left, and the unfinished checkpoints of epochs before `before`."""
    for path in root.glob(f"{_REMOVING}*"):
        shutil.rmtree(path)
    for path in root.glob(f"{_WRITING}*"):
        version = version_of(path.name.removeprefix(_WRITING))
        if version is None or version.epoch < before:
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint.

    Out of sight by one rename: neither half a checkpoint is seen, nor can its writer continue in what is removed.
    """
    doomed = path.with_name(f"{_REMOVING}{path.name.removeprefix(_WRITING)}")
    with suppress(FileNotFoundError):  # put in place meanwhile, or removed by another successor
        path.rename(doomed)
        shutil.rmtree(doomed)


def _check_adapter(
    path: Path, stored: dict[str, Json] | None, trained: dict[str, Json] | None
) -> None:
    if stored == trained:
        return
    if _named(stored) == _named(trained):
        raise UserError(
            f"checkpoint {path} holds an adapter of another base model: its weights have the fingerprint"
            f" {(stored or {})['base']}, those of model.path {(trained or {})['base']};"
            " give the model that the run started from"
        )
    raise UserError(
        f"checkpoint {path} holds {_named(stored)}, and the recipe trains {_named(trained)}:"
        " keep model.lora_rank, lora_alpha and target_modules, or start a run with another name"
    )


def _named(adapter: dict[str, Json] | None) -> str:
    if adapter is None:
        return "all weights"
    settings = ", ".join(f"{k} {v}" for k, v in sorted(adapter.items()) if k != "base")
    return f"a LoRA adapter ({settings})"


def _hash_together(path: Path, world: World) -> dict[str, str]:
    """Relative file name to hash of all files, durable; each rank reads those that it has written."""
    own = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if file.is_file() and _is_own(name, world):
            sync(file)
            own[name] = hash_of(file)
    parts = (json.loads(part) for part in _gathered(json.dumps(own), world))
    return {name: digest for part in parts for name, digest in part.items()}


def _is_own(name: str, world: World | None) -> bool:
    """Whether a file is of this rank's share: those that a rank of its number wrote; rank 0 has the others too."""
    writer = _WRITER.search(name)
    return world is None or (int(writer[1]) if writer else 0) % world.size == world.rank


def _gathered(text: str, world: World | None) -> list[str]:
    """Every rank's text, by rank."""
    return [text] if world is None else world.all_gather_text(text)


def hash_of(file: Path) -> str:
    """xxh3-128 of a file's bytes."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()

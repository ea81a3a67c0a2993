from __future__ import annotations

import errno
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.contract.errors import CapacityError, CorruptError, InfraError
from meshrl.contract.types import Version
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.checkpoint.checkpoint import Keep, TrainerState
from meshrl.trainer.checkpoint.dcp import INDEX, SafeReader
from meshrl.trainer.ranks.world import World

from . import rank_work, save_and_die
from .ranks import Ranks


def state(step: int, epoch: int = 1) -> TrainerState:
    return TrainerState(run="r", step=step, epoch=epoch, seed=0, world_size=1, kl_coef=0.1)


@pytest.mark.parametrize(("count", "rounds"), [(1, 12), (2, 6)])
def test_kill_9_while_saving_beside_training_leaves_the_last_committed_one(
    tmp_path: Path, tiny_path: Path, world: World, ranks: Ranks, count: int, rounds: int
) -> None:
    arguments = [tiny_path, tmp_path, count, rounds]
    ranks.run("save_and_die:main", *arguments, output=tmp_path / "output")
    output = (tmp_path / "output").read_text()
    lines = [[int(word) for word in line.split()] for line in output.splitlines()]
    assert [number for number, _ in lines] == list(range(rounds))
    learner = rank_work.make(tiny_path, world)
    for number, committed in lines:
        good = checkpoint.newest(tmp_path / str(number) / "checkpoints")
        assert good is not None and good[1].step >= committed
        loaded = checkpoint.load(good[0], learner.policy, learner.optimizers)
        assert loaded.step == good[1].step and loaded.world_size == count
        for _, parameter in learner.policy.named_tensors():
            assert bool((parameter.full_tensor() == loaded.step).all())  # type: ignore[attr-defined]


def test_what_was_frozen_is_what_is_written(tmp_path: Path, tiny_path: Path, world: World) -> None:
    learner = rank_work.make(tiny_path, world)
    save_and_die.fill(learner.policy, 1)
    frozen = checkpoint.freeze(learner.policy, learner.optimizers)
    save_and_die.fill(learner.policy, 2)
    path = checkpoint.write(tmp_path, frozen, state(1), world, keep=Keep(newest=1))
    checkpoint.load(path, learner.policy, learner.optimizers)
    assert all(bool((p == 1).all()) for p in learner.policy.parameters())


def test_the_newest_stay_and_every_nth() -> None:
    versions = [Version(1, step) for step in (9, 8, 7, 6, 5, 4, 3)]
    assert Keep(newest=2).drops(versions) == versions[2:]
    assert [v.step for v in Keep(newest=2, every=3).drops(versions)] == [7, 5, 4]


def test_a_write_that_another_trainer_swept_is_one_line(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    learner = rank_work.make(tiny_path, world)
    frozen = checkpoint.freeze(learner.policy, learner.optimizers)
    (tmp_path / "taken").write_text("a file where the directory should be")
    with pytest.raises(InfraError, match="cannot write the checkpoint of step 1"):
        checkpoint.write(tmp_path / "taken", frozen, state(1), world, keep=Keep(newest=1))


def full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_below_an_archive(*args: object, **kwargs: object) -> None:
    """As torch's archive writer says it: with a complaint of its own on top."""
    try:
        full()
    finally:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize("save", [full, full_below_an_archive])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(
    tmp_path: Path,
    tiny_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[..., None],
) -> None:
    learner = rank_work.make(tiny_path, world)
    frozen = checkpoint.freeze(learner.policy, learner.optimizers)
    checkpoint.write(tmp_path, frozen, state(1), world, keep=Keep(newest=1))
    monkeypatch.setattr(torch, "save", save)  # inside DCP's own error handling
    with pytest.raises(CapacityError, match=r"no space left in .* step 2; free some"):
        checkpoint.write(tmp_path, frozen, state(2), world, keep=Keep(newest=1))
    good = checkpoint.newest(tmp_path)
    assert good is not None and good[1].step == 1


class EnumsByName(pickle.Pickler):
    """As Python 3.11.2 pickles them."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_the_index_of_a_python_that_stores_enums_by_name_is_read(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    learner = rank_work.make(tiny_path, world)
    frozen = checkpoint.freeze(learner.policy, learner.optimizers)
    path = checkpoint.write(tmp_path, frozen, state(1), world, keep=Keep(newest=1)) / "tensors"
    index = SafeReader(path).read_metadata()
    with (path / INDEX).open("wb") as file:
        EnumsByName(file).dump(index)
    assert b"getattr" in (path / INDEX).read_bytes()
    assert SafeReader(path).read_metadata().state_dict_metadata == index.state_dict_metadata


class OfWhatIsNoEnum:
    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (OrderedDict, "fromkeys")


class Planted:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(Path(__file__).parent / "planted"),)


def test_an_index_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(pickle.dumps(Planted()))
    with pytest.raises(CorruptError, match=r"not an index that DCP wrote \(posix.mkdir\)"):
        SafeReader(tmp_path).read_metadata()
    assert not (Path(__file__).parent / "planted").exists()
    (tmp_path / INDEX).write_bytes(pickle.dumps(OfWhatIsNoEnum()))
    with pytest.raises(CorruptError, match=r"getattr of <class 'collections.OrderedDict'>, 'from"):
        SafeReader(tmp_path).read_metadata()


def test_an_index_that_is_refused_is_named_by_who_loads(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    learner = rank_work.make(tiny_path, world)
    frozen = checkpoint.freeze(learner.policy, learner.optimizers)
    path = checkpoint.write(tmp_path, frozen, state(1), world, keep=Keep(newest=1))
    (path / "tensors" / INDEX).write_bytes(pickle.dumps(Planted()))
    with pytest.raises(CorruptError, match=r"tensors/\.metadata: not an index that DCP wrote"):
        checkpoint.load(path, learner.policy, learner.optimizers)


def test_two_ranks_save_while_the_fleet_takes_a_version_slowly(
    tmp_path: Path, tiny_path: Path, ranks: Ranks
) -> None:
    ranks.run(
        "publish_slowly:main", tiny_path, tmp_path / "run", output=tmp_path / "output", ranks=2
    )
    assert (tmp_path / "output").read_text().splitlines() == ["1 2"]

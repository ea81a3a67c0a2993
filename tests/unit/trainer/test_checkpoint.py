from __future__ import annotations

import errno
import json
import os
import pickle
import stat
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from meshrl.contract.errors import CapacityError, CorruptError, FencedError, InfraError
from meshrl.contract.types import Version
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.checkpoint.dcp import INDEX, SafeReader, write_tensors
from meshrl.trainer.checkpoint.export import export_checkpoint, export_policy
from meshrl.trainer.checkpoint.kept import Keep
from meshrl.trainer.model.snapshot import layout
from meshrl.trainer.ranks.world import World

from .rank_programs import fill
from .rank_work import fresh, nudge, snapshot, state, tensors_of, weights
from .ranks import Ranks


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_loaded_model_and_optimizer_go_on_bit_for_bit(
    tmp_path: Path, tiny_path: Path, world: World, optimizer: str
) -> None:
    policy, optimizers = fresh(tiny_path, world, optimizer)
    nudge(policy, optimizers, 1)
    path = checkpoint.save(tmp_path, policy, optimizers, state(1), world, keep=2)
    nudge(policy, optimizers, 2)
    other, others = fresh(tiny_path, world, optimizer)
    gradients: set[int] = set()
    for part in others.parts:
        part.register_step_pre_hook(
            lambda *_: gradients.add(sum(p.grad is not None for p in other.parameters()))
        )
    assert checkpoint.load(path, other, others) == state(1)
    assert gradients == {1}  # of zeros, which make the states; all at once would be a model more
    nudge(other, others, 2)
    expected, got = weights(policy), weights(other)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_only_the_newest_checkpoints_are_kept(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, policy, optimizers, state(step), world, keep=2)
    assert [v for v, _ in checkpoint.complete(tmp_path)] == [Version(1, 3), Version(1, 2)]


def test_a_later_epoch_is_newer_than_a_higher_step(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    checkpoint.save(tmp_path, policy, optimizers, state(9, epoch=1), world, keep=2)
    checkpoint.save(tmp_path, policy, optimizers, state(4, epoch=2), world, keep=2)
    good = checkpoint.newest(tmp_path)
    assert good is not None and good[1].step == 4


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, tiny_path: Path, world: World) -> None:
    policy, optimizers = fresh(tiny_path, world)
    checkpoint.save(tmp_path, policy, optimizers, state(1), world, keep=2)
    path = checkpoint.save(tmp_path, policy, optimizers, state(2), world, keep=2)
    victim = next((path / "tensors").glob("*.distcp"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(CorruptError, match=r"differs from what state.json says"):
        checkpoint.read_state(path)
    good = checkpoint.newest(tmp_path)
    assert good is not None and good[1].step == 1


def test_leftovers_of_a_killed_writer_are_ignored_and_swept(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    leftover = tmp_path / ".writing-step-00000007-epoch-0001"
    leftover.mkdir()
    (leftover / "state.json").write_text(json.dumps({}))
    assert checkpoint.newest(tmp_path) is None
    policy, optimizers = fresh(tiny_path, world)
    checkpoint.save(tmp_path, policy, optimizers, state(1), world, keep=2)
    assert not leftover.exists()


MOMENTS = {
    "before it begins": (checkpoint, "_sweep"),
    "as it asks": (checkpoint, "_check_owner"),
    "before its tensors": (checkpoint, "write_tensors"),
    "after its tensors": (checkpoint, "_hash_together"),
    "at its end": (checkpoint, "sync"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("after", [False, True])
def test_a_trainer_whose_run_is_taken_over_puts_no_checkpoint_in_place(
    tmp_path: Path,
    tiny_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    after: bool,
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    checkpoint.take_over(tmp_path, 1)
    checkpoint.save(tmp_path, policy, optimizers, state(1, epoch=1), world, keep=2)
    where, name = MOMENTS[moment]
    product = getattr(where, name)
    of_the_successor = tmp_path / ".writing-step-00000002-epoch-0002"

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(where, name, product)
        result = product(*args, **kwargs) if after else None
        checkpoint.take_over(tmp_path, 2)
        of_the_successor.mkdir()
        return result if after else product(*args, **kwargs)

    monkeypatch.setattr(where, name, overtaken)
    with pytest.raises((FencedError, InfraError), match=r"epoch 1 is fenced|checkpoint of step 2"):
        checkpoint.save(tmp_path, policy, optimizers, state(2, epoch=1), world, keep=2)
    assert [version for version, _ in checkpoint.complete(tmp_path)] == [Version(1, 1)]
    assert [path.name for path in tmp_path.glob(".writing-*")] == [of_the_successor.name]


def test_transformers_loads_an_export_of_the_live_model_and_of_the_checkpoint(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    nudge(policy, optimizers, 1)
    checkpoint.save(tmp_path / "ckpt", policy, optimizers, state(1), world, keep=2)
    live = export_policy(policy, world, tmp_path / "live", tokenizer=tiny_path)
    stored = export_checkpoint(tmp_path / "ckpt", tmp_path / "stored", model=tiny_path)
    expected = weights(policy)
    for path in (live, stored):
        found = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], expected[n]) for n in found)
        assert (path / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_an_export_is_as_readable_as_the_umask_lets_it_be(
    tmp_path: Path, tiny_path: Path, world: World, umask: int
) -> None:
    (tiny_path / "tokenizer_config.json").write_text("{}")
    (tiny_path / "tokenizer_config.json").chmod(0o640)  # copies have the modes of their originals
    policy, _ = fresh(tiny_path, world)
    before = os.umask(umask)
    try:
        made = export_policy(policy, world, tmp_path / "live", tokenizer=tiny_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o777 & ~umask
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in made.iterdir()}
    assert {"model.safetensors", "tokenizer_config.json", "config.json"} <= modes.keys()
    assert set(modes.values()) == {0o666 & ~umask}, modes


def test_a_bfloat16_snapshot_holds_the_rounded_weights(tiny_path: Path, world: World) -> None:
    policy, _ = fresh(tiny_path, world)
    made = snapshot(policy, world, dtype="bfloat16", bucket_bytes=4096)
    expected, sent = weights(policy), tensors_of(made)
    assert next(iter(sent)) == "model.embed_tokens.weight"
    assert "lm_head.weight" not in sent  # tied: sent once
    assert len(made.manifest.bucket_bytes) > 1
    assert all(torch.equal(sent[n], expected[n].to(torch.bfloat16)) for n in sent)


def test_a_snapshot_does_not_move_when_training_goes_on(tiny_path: Path, world: World) -> None:
    policy, optimizers = fresh(tiny_path, world)
    made = snapshot(policy, world, bucket_bytes=1 << 20)
    before = made.bucket(0).copy()
    nudge(policy, optimizers, 1)
    assert np.array_equal(made.bucket(0), before)


def test_tensors_lie_aligned_in_order_and_a_large_one_alone() -> None:
    specs = layout(
        [("a", (3,)), ("b", (100,)), ("c", (2, 2)), ("d", ())],
        dtype="float32",
        itemsize=4,
        bucket_bytes=32,
    )
    assert [(s.bucket, s.offset, s.nbytes) for s in specs] == [
        (0, 0, 12),
        (1, 0, 400),
        (2, 0, 16),
        (2, 16, 4),
    ]


@pytest.mark.parametrize(("count", "rounds"), [(1, 6), (2, 3)])
def test_kill_9_while_saving_beside_training_leaves_the_last_committed_one(
    tmp_path: Path, tiny_path: Path, world: World, ranks: Ranks, count: int, rounds: int
) -> None:
    arguments = [tiny_path, tmp_path, count, rounds]
    ranks.run("save_and_die", *arguments, output=tmp_path / "output")
    output = (tmp_path / "output").read_text()
    lines = [[int(word) for word in line.split()] for line in output.splitlines()]
    assert [number for number, _ in lines] == list(range(rounds))
    policy, optimizers = fresh(tiny_path, world)
    for number, committed in lines:
        good = checkpoint.newest(tmp_path / str(number) / "checkpoints")
        assert good is not None and good[1].step >= committed
        loaded = checkpoint.load(good[0], policy, optimizers)
        assert loaded.step == good[1].step and loaded.world_size == count
        assert all(bool((tensor == loaded.step).all()) for tensor in weights(policy).values())


def test_what_was_frozen_is_what_is_written(tmp_path: Path, tiny_path: Path, world: World) -> None:
    policy, optimizers = fresh(tiny_path, world)
    fill(policy, 1)
    frozen = checkpoint.freeze(policy, optimizers)
    fill(policy, 2)
    path = checkpoint.write(tmp_path, frozen, state(1), world, keep=Keep(newest=1))
    checkpoint.load(path, policy, optimizers)
    assert all(bool((p == 1).all()) for p in policy.parameters())


def of_every_kind(policy: torch.nn.Module) -> dict[str, Any]:
    """A state with shards of a world of one, tensors of other types and forms, and what is no tensor."""
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(600, 700, generator=draw)
    tensors = {
        "large": table,
        "rows of large": table[100:],
        "turned": table[:6, :5].T,
        "part": table[:, 3],
        "scalar": torch.tensor(-1.5),
        "empty": torch.empty(0, 4),
        "steps": torch.tensor([1 << 40, -2]),
        "mask": torch.tensor([[True, False]]),
        **{
            name: table[:3, :2].to(getattr(torch, name))
            for name in ("bfloat16", "float16", "float64")
        },
    }
    groups = [{"lr": 1e-4, "betas": (0.9, 0.95), "params": ["a", "b"], "fused": None}]
    return {"model": policy.state_dict(), "tensors": tensors, "optimizer": {"param_groups": groups}}


def test_one_rank_writes_what_dcp_writes_and_dcp_reads(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    state = of_every_kind(fresh(tiny_path, world)[0])
    write_tensors(tmp_path / "own", state, world)
    state_dict_saver.save(state, storage_writer=FileSystemWriter(tmp_path / "torch"))
    own, theirs = (FileSystemReader(tmp_path / name).read_metadata() for name in ("own", "torch"))
    assert own.state_dict_metadata == theirs.state_dict_metadata
    assert own.planner_data == theirs.planner_data
    assert own.storage_data.keys() == theirs.storage_data.keys()
    sizes = [(tmp_path / name / "__0_0.distcp").stat().st_size for name in ("own", "torch")]
    assert sizes[0] <= sizes[1]

    blank = {name: torch.zeros_like(tensor) for name, tensor in state["tensors"].items()}
    found = {"tensors": blank, "optimizer": {"param_groups": [{"lr": 0.0, "betas": (0.0, 0.0)}]}}
    state_dict_loader.load(found, checkpoint_id=tmp_path / "own")
    torch.testing.assert_close(found["tensors"], state["tensors"], rtol=0, atol=0)
    assert found["optimizer"]["param_groups"] == [{"lr": 1e-4, "betas": (0.9, 0.95)}]

    whole = []
    for name in ("own", "torch"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        whole.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    assert whole[0].pop("optimizer") == whole[1].pop("optimizer")
    torch.testing.assert_close(whole[0], whole[1], rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 2])
def test_dcp_alone_reads_what_one_rank_wrote_on_any_number(
    tmp_path: Path, tiny_path: Path, world: World, ranks: Ranks, count: int
) -> None:
    parts = fresh(tiny_path, world)
    nudge(*parts, 1)
    path = checkpoint.save(tmp_path, *parts, state(1), world, keep=1)
    torch.save(weights(parts[0]), tmp_path / "weights.pt")
    arguments = [tiny_path, path / "tensors", tmp_path / "weights.pt"]
    ranks.run("read_by_dcp_alone", *arguments, output=tmp_path / "output", ranks=count)
    assert (tmp_path / "output").read_text().splitlines() == ["the same"] * count


def test_the_newest_stay_and_every_nth() -> None:
    versions = [Version(1, step) for step in (9, 8, 7, 6, 5, 4, 3)]
    assert Keep(newest=2).drops(versions) == versions[2:]
    assert [v.step for v in Keep(newest=2, every=3).drops(versions)] == [7, 5, 4]


def test_a_write_that_another_trainer_swept_is_one_line(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    frozen = checkpoint.freeze(*fresh(tiny_path, world))
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
    frozen = checkpoint.freeze(*fresh(tiny_path, world))
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
    path = checkpoint.save(tmp_path, *fresh(tiny_path, world), state(1), world, keep=1) / "tensors"
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
    parts = fresh(tiny_path, world)
    path = checkpoint.save(tmp_path, *parts, state(1), world, keep=1)
    (path / "tensors" / INDEX).write_bytes(pickle.dumps(Planted()))
    with pytest.raises(CorruptError, match=r"tensors/\.metadata: not an index that DCP wrote"):
        checkpoint.load(path, *parts)


def test_two_ranks_save_while_the_fleet_takes_a_version_slowly(
    tmp_path: Path, tiny_path: Path, ranks: Ranks
) -> None:
    ranks.run("publish_slowly", tiny_path, tmp_path / "run", output=tmp_path / "output", ranks=2)
    assert (tmp_path / "output").read_text().splitlines() == ["1 2"]

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshrl.contract.errors import InfraError, UserError
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.config import ParallelConfig
from meshrl.trainer.learner.micro_batcher import allows_whole_gradients
from meshrl.trainer.model import parallel
from meshrl.trainer.model.parallel import repeats, share_matrices, spread_experts
from meshrl.trainer.model.policy import random_hf
from meshrl.trainer.ranks.world import Compute, World

from . import rank_work, tiny
from .ranks import Ranks

RunTwo = Callable[..., list[float]]


@pytest.fixture
def run_two(ranks: Ranks, tiny_path: Path) -> RunTwo:
    def run(
        target: Path,
        rows: int,
        steps: int = 1,
        parallel: Mapping[str, int] | None = None,
        model: Path = tiny_path,
        size: int = 2,
        top: int = 0,
    ) -> list[float]:
        """Train up to `steps` steps on `size` processes; loss, gradient norm and entropy of the last."""
        target.mkdir(exist_ok=True)
        arguments = [model, target, rows, steps, parallel or {}, top]
        ranks.run("train", *arguments, output=target / "output", ranks=size)
        return [float(word) for word in (target / "numbers").read_text().split()]

    return run


@pytest.mark.parametrize("rows", [rank_work.GROUPS * rank_work.GROUP_SIZE, 1])
def test_two_ranks_give_the_loss_and_the_gradient_of_one(
    tiny_path: Path, tmp_path: Path, world: World, run_two: RunTwo, rows: int
) -> None:
    one = rank_work.train(tiny_path, tmp_path / "one", world, rows, 1)
    # With a single row the second rank has nothing to do and must join every collective all the same.
    two = run_two(tmp_path / "two", rows)
    assert two == pytest.approx(one, abs=1e-6)
    weights = [rank_work.exported(tmp_path / name / "export") for name in ("one", "two")]
    start = rank_work.exported(tiny_path)
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=1e-6)
    # The two layers and the rest, once: not for each of the micro-batches.
    reductions, passes = map(int, (tmp_path / "two" / "reductions").read_text().split())
    assert reductions == 3
    if rows > 1:
        assert passes > 1
        assert max((weights[0][n] - start[n]).abs().max() for n in start) > 1e-2

    one_rank_loads(tmp_path / "two" / "checkpoints", tiny_path, world, weights[1])


def one_rank_loads(
    checkpoints: Path, model: Path, world: World, weights: Mapping[str, torch.Tensor]
) -> None:
    """Load on one rank a checkpoint that several ranks saved."""
    found = checkpoint.newest(checkpoints)
    assert found is not None
    learner = rank_work.make(model, world)
    checkpoint.load(found[0], learner.policy, learner.optimizers)
    for name, tensor in rank_work.weights(learner.policy).items():
        assert torch.equal(tensor, weights[name])


def test_gradients_are_added_up_once_where_they_take_little_of_the_memory() -> None:
    assert allows_whole_gradients(600_000_000, 80 << 30)
    assert not allows_whole_gradients(7_600_000_000, 80 << 30)


def test_the_split_into_micro_batches_changes_no_gradient(tiny_path: Path, world: World) -> None:
    results = []
    for budget in (10_000, 64, 1):
        learner = rank_work.make(tiny_path, world, ppo_max_token_len_per_gpu=budget)
        metrics = rank_work.learn(learner, rank_work.trajectories())
        results.append((metrics, rank_work.weights(learner.policy)))
    assert [m["batch/micro_batches"] for m, _ in results] == [1, 4, 10]
    for metrics, weights in results[1:]:
        assert metrics["actor/loss"] == pytest.approx(results[0][0]["actor/loss"], abs=1e-6)
        assert metrics["actor/grad_norm"] == pytest.approx(
            results[0][0]["actor/grad_norm"], abs=1e-6
        )
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, results[0][1][name], rtol=0, atol=1e-6)


def test_the_order_in_which_rows_arrive_changes_no_bit(tiny_path: Path, world: World) -> None:
    rows = rank_work.trajectories()
    results = []
    for arrived in (rows, rows[::-1]):
        learner = rank_work.make(tiny_path, world)
        rank_work.learn(learner, arrived)
        results.append(rank_work.weights(learner.policy))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(
    tiny_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    learner = rank_work.make(tiny_path, world)
    with torch.no_grad():
        for name, parameter in learner.policy.named_tensors():
            if name.endswith("norm.weight"):
                parameter.fill_(torch.nan)
    before = rank_work.weights(learner.policy)
    metrics = rank_work.learn(learner, rank_work.trajectories())
    assert metrics["actor/skipped_updates"] == 1
    assert "not finite" in caplog.text
    torch.testing.assert_close(rank_work.weights(learner.policy), before, equal_nan=True)


def test_a_run_resumes_on_fewer_ranks_and_on_more(
    tiny_path: Path, tmp_path: Path, world: World, run_two: RunTwo
) -> None:
    rows = rank_work.GROUPS * rank_work.GROUP_SIZE
    first = rank_work.train(tiny_path, tmp_path / "one", world, rows, 1)
    shutil.copytree(tmp_path / "one", tmp_path / "one, then two")
    whole = rank_work.train(tiny_path, tmp_path / "one", world, rows, 2)
    assert abs(first[2] - whole[2]) > 1e-3  # the second step starts from other weights
    more = run_two(tmp_path / "one, then two", rows, steps=2)
    assert more == pytest.approx(whole, abs=1e-5)
    run_two(tmp_path / "two, then one", rows, steps=1)
    fewer = rank_work.train(tiny_path, tmp_path / "two, then one", world, rows, 2)
    assert fewer == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("top", [0, 3])
def test_ranks_that_share_sequences_give_the_loss_and_the_gradient_of_one(
    tiny_path: Path, tmp_path: Path, world: World, run_two: RunTwo, top: int
) -> None:
    rows = rank_work.GROUPS * rank_work.GROUP_SIZE
    alone = rank_work.train(tiny_path, tmp_path / "one", world, rows, 1, top)
    shared = run_two(tmp_path / "two", rows, parallel={"sequence": 2}, top=top)
    assert shared == pytest.approx(alone, abs=1e-5)
    weights = [rank_work.exported(tmp_path / name / "export") for name in ("one", "two")]
    for name in weights[0]:  # the updates are the gradients: see rank_work.make
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (2, {"expert": 2}),
        (2, {"tensor": 2}),
        (4, {"sequence": 2, "expert": 2}),
        (4, {"data_replicate": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_ranks_that_share_a_model_go_on_where_one_stopped_and_give_the_same(
    mixture_path: Path,
    tmp_path: Path,
    world: World,
    run_two: RunTwo,
    size: int,
    parallel: Mapping[str, int],
) -> None:
    rows, steps = rank_work.GROUPS * rank_work.GROUP_SIZE, 3
    rank_work.train(mixture_path, tmp_path / "one", world, rows, 1)
    target = tmp_path / "two"
    shutil.copytree(tmp_path / "one", target)
    alone = rank_work.train(mixture_path, tmp_path / "one", world, rows, steps)
    shared = run_two(target, rows, steps, parallel, model=mixture_path, size=size)
    assert shared == pytest.approx(alone, abs=1e-5)
    weights = [rank_work.exported(tmp_path / name / "export") for name in ("one", "two")]
    start = rank_work.exported(mixture_path)
    for name in weights[0]:  # the updates are the gradients: see rank_work.make
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=1e-5)
        assert not torch.equal(weights[1][name], start[name]), name
    one_rank_loads(target / "checkpoints", mixture_path, world, weights[1])


def test_models_that_cannot_be_shared_are_refused_in_one_line(world: World) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("efsdp", "ep"))
    with pytest.raises(UserError, match="no plan to spread experts of Qwen3ForCausalLM"):
        spread_experts(random_hf(tiny.config(), 0), mesh, None)
    three = Mock(spec=DeviceMesh, size=lambda: 3)
    with pytest.raises(
        UserError, match=r"tensor: 3 does not divide the model's num_attention_heads"
    ):
        share_matrices(random_hf(tiny.config(), 0), three)


def test_an_older_transformers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "version", lambda _: "5.22.1")
    two: Any = Mock(size=lambda: 2)
    both: Any = {"ep": two}
    hf = random_hf(tiny.config(), 0)
    for key, share in (
        ("expert", lambda: spread_experts(hf, both, None)),
        ("tensor", lambda: share_matrices(hf, two)),
    ):
        with pytest.raises(
            UserError, match=rf"parallel\.{key}: 2 needs transformers 5.23, and 5.22"
        ):
            share()


@pytest.mark.parametrize(
    ("parallel", "wrong"),
    [
        ({"expert": 3}, "expert: 3 does not divide the 8 trainer ranks"),
        ({"sequence": 3}, "sequence: 3 does not divide the 8 trainer ranks"),
        ({"tensor": 4, "sequence": 4}, "sequence: 4 does not divide the 8 trainer ranks, of which"),
        ({"data_shard": 2, "tensor": 2}, "data_shard: with the others 4 ranks, and there are 8"),
        ({"data_replicate": 2, "expert": 8}, "8 does not divide the 8 trainer ranks, 4 a copy"),
        ({"tensor": 4, "expert": 2}, "expert: 2 is not a multiple of tensor 4"),
    ],
)
def test_ranks_that_cannot_be_grouped_are_refused_in_one_line(
    parallel: Mapping[str, int], wrong: str
) -> None:
    ((_, fault),) = ParallelConfig.model_validate(parallel).faults(8)
    assert fault.startswith("trainer.parallel.") and wrong in fault


@pytest.mark.parametrize(
    ("queries", "keys", "size", "expected"),
    [(4, 2, 2, 1), (4, 2, 4, 2), (4, 1, 2, 2), (12, 3, 2, 2), (6, 3, 2, 2)],
)
def test_key_heads_are_repeated_until_every_rank_has_those_of_its_queries(
    queries: int, keys: int, size: int, expected: int
) -> None:
    times = repeats(queries, keys, size)
    assert times == expected
    of_query = [query * keys // queries for query in range(queries)]
    of_key = [key // times for key in range(keys * times)]
    for rank in range(size):
        mine = of_query[rank * queries // size : (rank + 1) * queries // size]
        given = of_key[rank * len(of_key) // size : (rank + 1) * len(of_key) // size]
        assert [given[i * len(given) // len(mine)] for i in range(len(mine))] == mine


async def test_a_rank_that_died_during_a_collective_is_one_line(world: World) -> None:
    gloo = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:59038:"
        " Connection reset by peer. This is typically caused by a remote worker hanging"
    )
    compute = Compute(world.device)

    def backward(said: str) -> None:
        raise RuntimeError(said)

    with pytest.raises(InfraError) as raised:
        await compute.run(lambda: backward(gloo))
    assert str(raised.value) == (
        "rank 0 of 1: a peer rank is gone (Read error [127.0.0.1]:59038: Connection reset by peer)"
    )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        await compute.run(lambda: backward("mat1 and mat2 shapes cannot be multiplied"))
    compute.close()


def test_each_file_of_a_checkpoint_is_hashed_by_one_rank_and_all_find_the_same_one(
    tiny_path: Path, tmp_path: Path, ranks: Ranks
) -> None:
    saved = tmp_path / "saved"
    ranks.run("hash_checkpoints", tiny_path, saved, output=tmp_path / "output", ranks=2)
    lines = (tmp_path / "output").read_text().splitlines()
    saved, loaded, steps = zip(*(map(int, line.split()) for line in lines), strict=True)
    tensors = next(path for _, path in checkpoint.complete(tmp_path / "saved")) / "tensors"
    sizes = {file.name: file.stat().st_size for file in tensors.iterdir()}
    shares = [sizes["__1_0.distcp"], sum(sizes.values()) - sizes["__1_0.distcp"]]
    assert sorted(saved) == sorted(loaded) == sorted(shares)
    # The rank that did not see the damage passes the damaged one over as well.
    assert steps == (1, 1)

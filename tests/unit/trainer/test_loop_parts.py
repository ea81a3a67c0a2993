from __future__ import annotations

import asyncio
import json
import math
import resource
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import TrainerPhase, TrainerStatus, Version, Waiting
from meshrl.trainer.config import ActorConfig, AlgorithmConfig, PolicyLossConfig
from meshrl.trainer.learner.experience import batch_from_json, batch_to_json, schedule
from meshrl.trainer.learner.optimizer import learning_rate, norms_of
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.learner.policy_gradient import PolicyGradient
from meshrl.trainer.loggers._types import LoggedRun
from meshrl.trainer.loggers.tensorboard import open_logger as tensorboard
from meshrl.trainer.loop.status import LiveStatus
from meshrl.trainer.metrics.log import LearningCheck, MetricsLog
from meshrl.trainer.metrics.utilisation import ModelWork, peak_memory
from meshrl.trainer.model.logprob import linear_argmax, linear_sum_pi_squared
from meshrl.trainer.model.policy import random_hf
from meshrl.trainer.ranks.world import Compute, World

from . import rank_work


def test_a_manifest_survives_being_read_out_to_other_ranks() -> None:
    batch = rank_work.batch(rank_work.trajectories())
    assert batch_from_json(json.loads(json.dumps(batch_to_json(batch)))) == batch


def test_mini_batches_are_whole_groups_and_cover_the_batch() -> None:
    batch = rank_work.batch(rank_work.trajectories())
    made = schedule(batch, ranks=2, max_tokens=64, mini_batch_groups=2)
    groups = [{made.rows[row].group for row in mini.rows} for mini in made.mini_batches]
    assert groups == [{"t0", "t1"}, {"t2", "t3"}, {"t4"}]
    assert sorted(made.own(0) + made.own(1)) == list(range(len(batch.rows)))


def test_pairs_that_a_loss_compares_share_a_micro_batch() -> None:
    batch = rank_work.batch(rank_work.trajectories())
    made = schedule(batch, ranks=2, max_tokens=1, mini_batch_groups=None, whole_groups=True)
    for rank in made.mini_batches[0].ranks:
        for micro in rank:
            groups = [made.rows[row].group for row in micro]
            assert all(groups.count(group) == rank_work.GROUP_SIZE for group in groups)


def test_lines_of_a_history_that_a_crash_undid_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 5):
        log.write(step, {"loss": float(step), "bad": math.nan})
        log.write(step, {"val/score/mean": float(step)})
    log.close()
    with path.open("a") as stream:
        stream.write('{"step": 5, "lo')  # killed in the middle of a line
    log = MetricsLog(path)
    log.resume_at(2)
    log.write(3, {"loss": 30.0})
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # Step 2 is in the checkpoint, the evaluation behind it is made again.
    kept = [(line["step"], line.get("loss")) for line in lines]
    assert kept == [(1, 1.0), (1, None), (2, 2.0), (3, 30.0)]
    assert lines[0]["bad"] is None


def test_a_run_whose_steps_were_counted_from_0_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old = [{"step": 0, "val/score/mean": 0.1}, *({"step": n, "loss": n} for n in range(3))]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    log = MetricsLog(path)
    log.resume_at(2)  # two steps were made: 0 and 1 of theirs
    log.write(3, {"loss": 2})
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line.get("loss") for line in lines] == [None, 0, 1, 2]


def test_a_long_record_of_metrics_is_thinned_from_its_beginning_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, most = tmp_path / "metrics.jsonl", 20_000
    log = MetricsLog(path, max_bytes=most)
    for step in range(2000):
        log.write(step, {"reward/mean": 0.5})
        if step % 10 == 0:
            log.write(step, {"val/score/mean": 0.1})
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.stat().st_size <= most
    for key, every in (("reward/mean", 1), ("val/score/mean", 10)):
        steps = [line["step"] for line in lines if key in line]
        assert (steps[0], steps[-1]) == (0, 2000 - every)
        gaps = [after - before for before, after in pairwise(steps)]
        assert gaps == sorted(gaps, reverse=True)
        assert gaps[-1] == every
    assert "every second line of its older half was left out" in caplog.text


def test_a_full_disk_does_not_end_training_and_loses_no_line_of_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, max_bytes=500)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for step in range(20):
            # With room for 14 lines the file cannot grow to where it would be thinned.
            room = 480 if 5 <= step < 18 else limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
            log.write(step, {"reward/mean": 0.5})
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps[-10:] == list(range(10, 20))
        assert caplog.text.count("metrics wait in memory until they can be written") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.close()


def test_a_kill_while_metrics_are_thinned_leaves_them_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, max_bytes=200)
    for step in range(6):
        log.write(step, {"reward/mean": 0.5})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        log.write(6, {"reward/mean": 0.5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(7))
    log.close()


def test_a_run_of_equal_rewards_says_that_it_learns_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    equal = {"advantages/rows_in_equal_groups": 1.0, "reward/mean": 1.0, "actor/grad_norm": 0.0}
    log = MetricsLog(tmp_path / "metrics.jsonl", [LearningCheck()])
    for step in range(1, 23):
        log.write(step, equal)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"step {steps}: nothing is learned: in each of the last {steps} steps all rows of each group had the same"
        " reward (mean 1.000); is the reward constant, or the task too easy or too hard?"
        " (docs/how-to/learning-fails.md#equal-groups)"
        for steps in (5, 10, 20)
    ]
    log.close()


def test_a_run_without_a_gradient_says_so_and_one_good_step_ends_the_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", [LearningCheck()])
    for step in range(1, 13):
        log.write(step, {"actor/grad_norm": 0.5 if step == 3 else 0.0})
        log.write(step, {"val/score/mean": 0.1})
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning == (
        "step 8: nothing is learned: the gradient was 0 in each of the last 5 steps"
        " (docs/how-to/learning-fails.md#no-gradient)"
    )
    log.close()


class BreaksAt:
    """A logger of somebody else's that does not take one name."""

    def __init__(self, name: str) -> None:
        self.name, self.steps = name, list[int]()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name in values:
            name.encode()
        self.steps.append(step)

    def close(self) -> None:
        pass


def test_a_logger_that_fails_does_not_end_training_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = BreaksAt("a"), BreaksAt("b")
    log = MetricsLog(
        tmp_path / "metrics.jsonl",
        [bad, tensorboard(LoggedRun(directory=tmp_path, project="p", name="n")), good],
    )
    for step in range(3):
        log.write(step, {"loss": 1.0} | ({"reward/\ud800": 2.0} if step < 2 else {}))
    log.close()
    assert (bad.steps, good.steps) == ([2], [2])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert caplog.text.count("the logger BreaksAt does not take the metrics of step 0") == 2
    assert caplog.text.count("the logger ") == 3


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802]),
    ],
)
def test_the_learning_rate_warms_up_and_falls(kind: str, rates: list[float]) -> None:
    config = OptimConfig.model_validate(
        {"lr": 1.0, "lr_warmup_steps": 2, "lr_scheduler_type": kind, "min_lr_ratio": 0.1}
    )
    found = [learning_rate(config, step, 6) for step in range(6)]
    assert found == pytest.approx(rates, abs=1e-6)
    assert learning_rate(config, 60, 6) == pytest.approx(1.0 if kind == "constant" else 0.1)


def test_a_rate_starts_above_zero_and_falls_until_a_step_of_its_own() -> None:
    config = OptimConfig.model_validate(
        {"lr": 1.0, "lr_warmup_steps": 2, "lr_warmup_init_ratio": 0.2}
        | {"lr_scheduler_type": "linear", "lr_decay_steps": 4, "min_lr_ratio": 0.1}
    )
    found = [learning_rate(config, step, 100) for step in range(6)]
    assert found == pytest.approx([0.6, 1.0, 1.0, 0.55, 0.1, 0.1])


def test_updates_that_were_left_out_are_counted_and_in_no_mean() -> None:
    metrics = norms_of("prime", [1.0, math.nan, 3.0, math.inf])
    assert metrics == {"prime/grad_norm": 2.0, "prime/skipped_updates": 2}
    assert math.isnan(norms_of("prime", [math.nan])["prime/grad_norm"])


def test_chunked_sums_of_squares_and_argmax_equal_the_whole() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(19, 8), torch.randn(31, 8)
    p = ((hidden @ weight.T) / 0.7).softmax(-1)
    mine = linear_sum_pi_squared(hidden, weight, temperature=0.7, chunk_elements=62)
    torch.testing.assert_close(mine, p.square().sum(-1))
    assert torch.equal(linear_argmax(hidden, weight, chunk_elements=62), p.argmax(-1))


def test_an_estimator_that_nobody_can_feed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "astral.py").write_text('NEEDS = ("star_signs",)\ncompute = None\n')
    with pytest.raises(ConfigError, match=r"mine\.astral needs star_signs, which no service"):
        PolicyGradient(
            AlgorithmConfig(adv_estimator="mine.astral"), ActorConfig(), max_response_length=8
        )


def test_a_loss_that_reads_the_reference_asks_for_its_column() -> None:
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="dpo"))
    objective = PolicyGradient(
        AlgorithmConfig(adv_estimator="preference"), actor, max_response_length=8
    )
    assert objective.needs.columns == ("ref_logprobs",)
    assert objective.needs.whole_groups


@pytest.mark.parametrize(
    ("algorithm", "actor"),
    [
        ({"adv_estimator": "optimal_token_baseline"}, {}),
        ({"rollout_correction": {"bypass_mode": True, "rollout_is": "token"}}, {}),
        ({"rollout_correction": {"proximal": "interpolate"}}, {"ppo_max_token_len_per_gpu": 1}),
        ({"rollout_correction": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 1.0}}, {}),
        ({}, {"recompute_old_log_probs": False, "ppo_epochs": 2}),
        ({}, {"policy_loss": {"positive_nll_coef": 0.1}, "loss_agg_mode": "seq-mean-token-mean"}),
    ],
)
def test_every_source_of_old_logprobs_makes_a_finite_step(
    tiny_path: Path, world: World, algorithm: dict[str, object], actor: dict[str, object]
) -> None:
    learner = rank_work.make(tiny_path, world, algorithm=algorithm, **actor)
    rows = rank_work.trajectories()
    metrics = rank_work.learn(learner, [rank_work.silent(rows[0]), *rows[1:]])
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/skipped_updates"] == 0


async def test_a_watcher_hears_of_changes_and_of_the_end() -> None:
    live_status = LiveStatus(total_steps=4)
    statuses: list[TrainerStatus] = []

    async def watch() -> None:
        statuses.extend([status async for status in live_status.watch(60.0)])

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    live_status.version = Version(1, 1)
    with live_status.phase(TrainerPhase.WAITING):
        live_status.blocked([Waiting(who="trainer", what="16 rows", since_s=3.0, owners=("w1",))])
        await asyncio.sleep(0.01)
    metrics = live_status.stepped({"reward/mean": 0.5, "note": "x"}, {0: 3, 1: 1}, tokens=100)
    live_status.ended(failed=False)
    await watching
    assert any("16 rows, 3 s (w1)" in status.waiting_for for status in statuses)
    last = statuses[-1]
    assert (last.phase, last.samples, dict(last.staleness)) == (TrainerPhase.DONE, 4, {0: 3, 1: 1})
    assert last.reward_mean == 0.5 and last.eta_s is not None
    assert metrics["time/waiting_s"] > 0


def test_a_step_says_how_well_it_used_its_devices() -> None:
    live_status = LiveStatus(total_steps=1, ranks=2, peak_tflops=100.0)
    with live_status.phase(TrainerPhase.TRAINING):
        time.sleep(0.02)
    metrics = live_status.stepped({"batch/tflops": 8.0}, {}, tokens=600)
    numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
    seconds, training_s = numbers["time/step_s"], numbers["time/training_s"]
    assert numbers["share/training"] == pytest.approx(training_s / seconds)
    assert numbers["throughput/tokens_per_s_per_gpu"] == pytest.approx(300 / seconds)
    assert numbers["throughput/tflops_per_s_per_gpu"] == pytest.approx(4 / training_s)
    assert numbers["throughput/mfu"] == pytest.approx(0.04 / training_s)
    assert 0 < peak_memory(torch.device("cpu"))["memory/peak_gib"] < 1000


def test_the_work_of_a_model_is_what_its_matrices_take() -> None:
    config = Qwen3Config(
        vocab_size=100, hidden_size=8, intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, tie_word_embeddings=False,
    )  # fmt: skip
    matrices = sum(
        parameter.numel()
        for name, parameter in random_hf(config, 0).named_parameters()
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
    )
    work = ModelWork.of(config)
    assert work is not None
    assert work.flops([10], 0) == 6 * matrices * 10 + 6 * 3 * 16 * 10**2
    assert work.flops([10], 5) - work.flops([10], 0) == 6 * 100 * 8 * 5
    assert ModelWork.of(object()) is None


async def test_work_runs_one_piece_after_the_other(world: World) -> None:
    compute = Compute(world.device)
    order: list[int] = []
    await asyncio.gather(*(compute.run(lambda n=n: order.append(n)) for n in range(20)))  # type: ignore[misc]
    assert order == list(range(20))
    compute.close()

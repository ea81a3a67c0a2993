"""Trained rows and their order: dynamic sampling, greedy baselines, redrawn rows, curricula, steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from meshrl.contract.errors import ConfigError, CorruptError, UserError
from meshrl.contract.types import SamplingParams, Task, Trajectory, Uid, Version, VersionSpan
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, outcome_rewards
from meshrl.trainer.algorithms.advantages.gigpo import anchors_of, steps_of
from meshrl.trainer.algorithms.advantages.gigpo import compute as gigpo
from meshrl.trainer.algorithms.advantages.hgpo import HgpoConfig, of_histories
from meshrl.trainer.algorithms.advantages.hgpo import compute as hgpo
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.algorithms.rollout_correction import interpolate
from meshrl.trainer.config import ActorConfig, AlgorithmConfig, OverlongBufferConfig
from meshrl.trainer.data.feeder import Feeder, PromptOrder
from meshrl.trainer.data.prompts import Prompt, PromptSet
from meshrl.trainer.learner.beside import explained_variance, monte_carlo
from meshrl.trainer.learner.experience import assemble, redrawn, schedule
from meshrl.trainer.learner.metrics import batch_mismatch
from meshrl.trainer.learner.policy_gradient import ForwardOutputs, PolicyGradient
from meshrl.trainer.ranks.world import World

from . import rank_work


def row(*parts: tuple[str, int]) -> Trajectory:
    """A row of prompt (p), sampled (s) and observed (the rest) runs; equal letters are equal tokens."""
    tokens = [ord(kind) for kind, count in parts for _ in range(count)]
    mask = [int(kind == "s") for kind, count in parts for _ in range(count)]
    return Trajectory(
        uid=Uid("r", "t", 0), tokens=np.array(tokens, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.uint8),
        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
        spans=(VersionSpan(version=Version(1, 0), start=parts[0][1], end=len(tokens)),), reward=0.0,
    )  # fmt: skip


def layout(rows: Sequence[Trajectory]) -> Ragged:
    masks = [torch.from_numpy(r.loss_mask[r.prompt_length :]).bool() for r in rows]
    lengths = torch.tensor([len(mask) for mask in masks])
    return Ragged.from_lengths(lengths, torch.cat(masks), torch.zeros(len(rows), dtype=torch.int64))


def test_steps_are_runs_of_sampled_tokens_and_anchors_what_stands_before_them() -> None:
    rows = [
        row(("p", 3), ("s", 2), ("A", 2), ("s", 1), ("B", 1), ("s", 2)),
        row(("p", 3), ("s", 1), ("B", 1), ("s", 3)),
    ]
    steps = steps_of(layout(rows), [anchors_of(r) for r in rows])
    assert steps.rows.tolist() == [0, 0, 0, 1, 1]
    assert steps.of_token.tolist() == [0, 0, -1, -1, 1, -1, 2, 2, 3, -1, 4, 4, 4]
    prompt, a, b, other_prompt, other_b = steps.anchors.tolist()
    assert (prompt, b) == (other_prompt, other_b) and len({prompt, a, b}) == 3


def test_gigpo_judges_each_step_against_steps_from_the_same_observation() -> None:
    # Two episodes of one prompt: right and wrong. Both pass through observation B, only the first through A.
    rows = [
        row(("p", 1), ("s", 1), ("A", 1), ("s", 1), ("B", 1), ("s", 1)),
        row(("p", 1), ("s", 1), ("B", 1), ("s", 1)),
    ]
    ragged = layout(rows)
    rewards = torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0])
    steps = steps_of(ragged, [anchors_of(r) for r in rows])
    batch = AdvantageBatch(ragged=ragged, token_rewards=rewards, steps=steps)
    found = gigpo(batch, AlgorithmConfig(gamma=0.5)).advantages
    # A^E = ±1/2. Returns: 1/4, 1/2, 1 and 0, 0. A^S at the prompt ±1/8, at A 0 (nobody shares it), at B ±1/2.
    expected = [0.5 + 0.125, 0, 0.5, 0, 0.5 + 0.5, -0.5 - 0.125, 0, -0.5 - 0.5]
    torch.testing.assert_close(found, torch.tensor(expected))


class TestHgpo:
    """Three episodes of one prompt that earn 1, 0, 0: observations p A B, p B, p A B."""

    episodes: ClassVar = [0, 0, 0, 1, 1, 2, 2, 2]
    anchors: ClassVar = [0, 1, 2, 0, 2, 0, 1, 2]
    returns: ClassVar = [1.0, 1, 1, 0, 0, 0, 0, 0]

    def judged(self, returns: Sequence[float] = returns, **config: Any) -> list[float]:
        R = torch.tensor(returns)
        of_episode = torch.tensor([2 / 3, -1 / 3, -1 / 3])
        episodes = torch.tensor(self.episodes)
        found = of_histories(
            R,
            torch.zeros(8, dtype=torch.int64),
            episodes,
            torch.tensor(self.anchors),
            of_episode[episodes],
            HgpoConfig(**config),
        )
        return found.tolist()

    def test_a_step_is_judged_by_every_part_of_its_history_that_is_shared(self) -> None:
        # k = 1, weight 2: p and B 2/3, -1/3, -1/3; A 1/2, -1/2. k = 2, weight 3: pA and AB 1/2, -1/2; pB is alone.
        ends = (2 * 2 / 3 + 3 / 2) / 5, (-2 / 3 - 3 / 2) / 5
        want = [2 / 3, 1 / 2, ends[0], -1 / 3, -1 / 3, -1 / 3, -1 / 2, ends[1]]
        assert self.judged(history_length=1) == pytest.approx(want)

    def test_a_longer_history_adds_a_group_of_more_weight(self) -> None:
        found = self.judged(history_length=2)  # pAB, weight 4: 1/2, -1/2
        assert found[2] == pytest.approx((2 * 2 / 3 + 3 / 2 + 4 / 2) / 9)
        assert found[7] == pytest.approx((-2 / 3 - 3 / 2 - 4 / 2) / 9)

    def test_without_history_it_is_gigpos_step_advantage(self) -> None:
        want = [2 / 3, 1 / 2, 2 / 3, -1 / 3, -1 / 3, -1 / 3, -1 / 2, -1 / 3]
        assert self.judged(history_length=0) == pytest.approx(want)

    def test_the_episode_may_count_with_weight_one(self) -> None:
        assert self.judged(history_length=1, base_group=True)[1] == pytest.approx(
            (2 / 3 + 5 / 2) / 6
        )

    def test_weights_follow_alpha(self) -> None:
        found = self.judged(history_length=1, length_weight_alpha=2.0)
        assert found[2] == pytest.approx((4 * 2 / 3 + 9 / 2) / 13)

    def test_deviations_are_biased(self) -> None:
        found = self.judged(history_length=0, mode="mean_std_norm")
        assert found[0] == pytest.approx((2 / 3) / (math.sqrt(2 / 9) + 1e-6))

    def test_equal_returns_say_nothing_and_have_no_weight(self) -> None:
        assert self.judged([0.1] * 8) == [0.0] * 8
        # A and AB are 0.7 twice: what is left of the last step is its observation alone.
        found = self.judged([0.7, 0.7, 0.7, 0.1, 0.1, 0.7, 0.7, 0.7], history_length=2)
        assert found[2] == pytest.approx(0.2) and found[1] == 0

    def test_episodes_and_rows_of_one_step_give_the_same(self) -> None:
        rows = [
            row(("p", 1), ("s", 1), ("A", 1), ("s", 1), ("B", 1), ("s", 1)),
            row(("p", 1), ("s", 1), ("B", 1), ("s", 1)),
        ]
        ragged = layout(rows)
        steps = steps_of(ragged, [anchors_of(r) for r in rows])
        rewards = torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0])
        batch = AdvantageBatch(ragged=ragged, token_rewards=rewards, steps=steps)
        config = AlgorithmConfig(gamma=0.5)
        whole = hgpo(batch, config).advantages[ragged.mask]
        single = Ragged.from_lengths(
            torch.ones(5, dtype=torch.int64), torch.ones(5, dtype=torch.bool), torch.zeros(5).long()
        )
        of_steps = AdvantageBatch(
            ragged=single,
            token_rewards=torch.tensor([0.0, 0, 1, 0, 0]),
            trajectories=steps.rows,
            anchors=steps.anchors,
        )
        torch.testing.assert_close(hgpo(of_steps, config).advantages, whole)
        # Returns 1/4, 1/2, 1 and 0, 0: p ±1/8; A and AB are alone; B ±1/2.
        torch.testing.assert_close(whole, torch.tensor([0.125, 0, 0.5, -0.125, -0.5]))


def test_the_last_sibling_is_greedy_and_no_other() -> None:
    sampling = SamplingParams(temperature=0.7, greedy_siblings=1)
    assert [sampling.of_row(i, 3).temperature for i in range(3)] == [0.7, 0.7, 0.0]
    assert SamplingParams(temperature=0.7).of_row(2, 3).temperature == 0.7


def test_baselines_are_scheduled_apart() -> None:
    batch = rank_work.batch(rank_work.trajectories())
    made = schedule(batch, ranks=1, max_tokens=64, mini_batch_groups=None, extra_rows=1)
    assert {r.uid.index for r in made.rows} == {0} and len(made.rows) == rank_work.GROUPS
    assert {r.uid.index for r in made.baselines} == {1} and len(made.baselines) == rank_work.GROUPS


def test_redrawn_rows_stay_on_their_rank_and_every_rank_makes_as_many_passes() -> None:
    batch = rank_work.batch(rank_work.trajectories())
    made = schedule(batch, ranks=2, max_tokens=64, mini_batch_groups=3)
    drawn = [0, 0, 0, 3, 3, 5, 9, 9]
    minis = redrawn(made, drawn, max_tokens=64)
    chosen = Counter(r for mini in minis for rank in mini.ranks for micro in rank for r in micro)
    assert chosen == Counter(drawn)
    for mini in minis:
        assert len({len(rank) for rank in mini.ranks}) == 1
        for rank, micros in enumerate(mini.ranks):
            assert {r for micro in micros for r in micro} <= set(made.own(rank))
            for micro in micros:
                assert len(micro) <= 1 or sum(made.rows[r].num_tokens for r in micro) <= 64
    assert redrawn(made, [0], max_tokens=64)[0].rows == (0,)


def test_monte_carlo_returns_skip_what_the_policy_did_not_sample() -> None:
    rows = [row(("p", 1), ("s", 2), ("A", 1), ("s", 1))]
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0])
    found = monte_carlo(layout(rows), rewards, 0.5)
    assert found.tolist() == [0.25, 0.5, 0.0, 1.0]


def test_explained_variance_is_one_for_the_returns_themselves_and_zero_for_a_constant() -> None:
    ragged = layout([row(("p", 1), ("s", 4))])
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(ragged, returns, returns) == pytest.approx(1.0)
    assert explained_variance(ragged, torch.full((4,), 7.0), returns) == pytest.approx(0.0)
    assert explained_variance(ragged, returns, torch.ones(4)) == 0.0


def test_the_interpolated_anchor_moves_to_the_policy_as_tokens_grow_stale() -> None:
    sampled, now = torch.full((3,), -2.0), torch.full((3,), -1.0, requires_grad=True)
    anchor = interpolate(sampled, now, torch.tensor([0, 1, 4]))
    assert anchor.tolist() == [-2.0, -2.0, -1.25] and not anchor.requires_grad


def prompts(count: int, **extra: object) -> PromptSet:
    made = [
        Prompt(
            index=i,
            prompt_ids=np.zeros(5 - i % 5, dtype=np.int32),
            extra_info={key: value[i] for key, value in extra.items()},  # type: ignore[index]
        )
        for i in range(count)
    ]
    return PromptSet(prompts=tuple(made), skipped=0, fingerprint="x")


class Open:
    """A queue that admits everything, from an empty cursor."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    async def run_state(self, run: str) -> object:
        return type("State", (), {"feed_closed": False, "cursor": ""})

    async def admit(self, run: str, tasks: Sequence[Task], *, cursor: str, wait_s: float) -> int:
        self.tasks += tasks
        return len(tasks)

    async def close_feed(self, run: str) -> None:
        return


async def fed(made: PromptSet, curriculum: str | None, epochs: int = 1) -> list[int]:
    queue = Open()
    feeder = Feeder(
        queue, "r", made,  # type: ignore[arg-type]
        lambda prompt, name: Task(run="r", task_id=name, prompt_ids=prompt.prompt_ids),
        epochs=epochs, order=PromptOrder(shuffle=True, seed=3, curriculum=curriculum),
    )  # fmt: skip
    await feeder.run()
    return [int(task.task_id.split("-")[1]) for task in queue.tasks]


async def test_a_curriculum_orders_an_epoch_and_leaves_nothing_out() -> None:
    made = prompts(20, difficulty=[float(-i % 7) for i in range(20)])
    by_length = await fed(made, "length", epochs=2)
    lengths = [len(made.prompts[i].prompt_ids) for i in by_length]
    assert lengths[:20] == sorted(lengths[:20]) and lengths[20:] != sorted(lengths[20:])
    assert sorted(by_length[:20]) == sorted(by_length[20:]) == list(range(20))
    by_difficulty = await fed(made, "difficulty")
    found = [made.prompts[i].extra_info["difficulty"] for i in by_difficulty]
    assert found == sorted(found) and by_difficulty == await fed(made, "difficulty")


async def test_a_curriculum_that_cannot_order_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="difficulty None, want a number"):
        await fed(prompts(2), "difficulty")
    with pytest.raises(ConfigError, match="did you mean 'length'"):
        await fed(prompts(2), "lenght")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "course.py").write_text("def order(p, e, s): return [0, 0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError, match=r"half\.course: order\(\) gave 2 places, want each of 0\.\.1"
    ):
        await fed(prompts(2), "half.course")


def test_a_task_without_greedy_siblings_is_what_it_was() -> None:
    assert replace(SamplingParams(), greedy_siblings=0) == SamplingParams()


def test_the_mismatch_is_reported_by_policy_version() -> None:
    ragged = layout([row(("p", 1), ("s", 2)), row(("p", 1), ("s", 2))])
    trainer = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    rollout = torch.tensor([-1.0, -1.0, -0.5, -0.5])
    facts = batch_mismatch(ragged, trainer, rollout, torch.tensor([4, 4, 3, 3]), ("", ""))
    assert facts["mismatch/version_4/kl"] == pytest.approx(0.0)
    assert facts["mismatch/version_3/kl"] == pytest.approx(0.5)
    one = batch_mismatch(ragged, trainer, rollout, torch.full((4,), 3), ("", ""))
    assert not any("version" in name or "replica" in name for name in one)
    assert one["mismatch/kl"] > 0


def test_the_mismatch_is_reported_by_engine_replica() -> None:
    ragged = layout([row(("p", 1), ("s", 2)), row(("p", 1), ("s", 1)), row(("p", 1), ("s", 1))])
    trainer = torch.full((4,), -1.0)
    rollout = torch.tensor([-1.0, -1.0, -0.5, -1.0])
    replicas = ("rollout-1", "rollout-0", "rollout-1")
    facts = batch_mismatch(ragged, trainer, rollout, torch.full((4,), 3), replicas)
    assert facts["mismatch/replica_rollout-0/kl"] == pytest.approx(0.5)
    assert facts["mismatch/replica_rollout-1/kl"] == pytest.approx(0.0)
    assert not any("version" in name for name in facts)


def test_rewards_of_tokens_count_instead_of_the_score_and_penalties_join_them(
    world: World,
) -> None:
    rows = [
        replace(
            one,
            reward=1.0 + one.uid.index,
            token_rewards=np.where(one.loss_mask, 0.5, 0).astype(np.float32),
        )
        for one in rank_work.trajectories()
    ]
    made = schedule(rank_work.batch(rows), ranks=1, max_tokens=64, mini_batch_groups=None)
    by_uid = {one.uid: one for one in rows}
    experience = assemble(made, [by_uid[uid] for uid in made.uids(0)], world)
    long = OverlongBufferConfig(enable=True, len=int(experience.ragged.lengths.max()))
    algorithm = AlgorithmConfig(overlong_buffer=long)
    objective = PolicyGradient(algorithm, ActorConfig(), max_response_length=long.len)
    found = objective.targets(experience, ForwardOutputs()).token_rewards
    penalties = -experience.ragged.lengths / long.len
    wanted = 0.5 * experience.ragged.mask + outcome_rewards(experience.ragged, penalties)
    torch.testing.assert_close(found, wanted)
    plain = replace(experience, token_rewards=None)
    scores = outcome_rewards(plain.ragged, plain.rewards + penalties)
    torch.testing.assert_close(objective.targets(plain, ForwardOutputs()).token_rewards, scores)


def test_the_reward_of_a_row_without_tokens_counts_in_its_group(world: World) -> None:
    one, other = rank_work.trajectories()[:2]
    rows = [replace(one, reward=1.0), rank_work.silent(replace(other, reward=-1.0))]
    made = schedule(rank_work.batch(rows), ranks=1, max_tokens=64, mini_batch_groups=None)
    experience = assemble(made, rank_work.own_rows(made, rows), world)
    dr_grpo = AlgorithmConfig(adv_estimator="dr_grpo")
    objective = PolicyGradient(dr_grpo, ActorConfig(), max_response_length=64)
    found = objective.targets(experience, ForwardOutputs()).advantages
    assert found.tolist() == experience.ragged.mask.float().tolist()


def test_a_batch_that_has_rewards_of_tokens_has_them_for_every_row(world: World) -> None:
    rows = rank_work.trajectories()
    rows[0] = replace(rows[0], token_rewards=np.zeros(len(rows[0].tokens), dtype=np.float32))
    made = schedule(rank_work.batch(rows), ranks=1, max_tokens=64, mini_batch_groups=None)
    by_uid = {one.uid: one for one in rows}
    with pytest.raises(CorruptError, match="has no token_rewards, others of its batch have"):
        assemble(made, [by_uid[uid] for uid in made.uids(0)], world)

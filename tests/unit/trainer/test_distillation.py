"""On-policy distillation, in which a policy becomes its teacher, and the KL terms to a reference."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshrl.config import load_recipe, needs_reference
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Trajectory, Uid, Version, VersionSpan
from meshrl.trainer.algorithms.distillation import distil, forward_kl
from meshrl.trainer.algorithms.kl import KlController, kl_in_reward, kl_penalty
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import KL_ESTIMATORS, DistillationConfig, KlControlConfig
from meshrl.trainer.learner.learner import Learner
from meshrl.trainer.model.policy import random_hf
from meshrl.trainer.ranks.world import World
from meshrl.trainer.reference.model import ReferenceModel

from ...small_checkpoint import write_tokenizer, write_weights
from . import named_algorithms, tiny

PROMPT, ANSWER, ROWS = named_algorithms.PROMPT, 6, 32


@pytest.fixture(scope="module")
def world() -> World:
    return World.start("cpu")


class TestJudgement:
    """Two rows, of three tokens with the middle one not sampled, and of two."""

    ragged = Ragged.from_lengths(
        torch.tensor([3, 2]), torch.tensor([True, False, True, True, True])
    )
    A = torch.tensor([1.0, 0.0, 1.0, -1.0, -1.0])
    old = torch.tensor([-1.0, -9.0, -2.0, -0.5, -1.0])
    teacher = torch.tensor([-3.0, -1.0, -1.0, -0.5, -31.0])

    def mixed(self, **config: float) -> list[float]:
        found = distil(self.ragged, self.A, self.old, self.teacher, DistillationConfig(**config))
        return found.advantages.tolist()

    def test_each_sampled_token_answers_for_itself(self) -> None:
        # log π_T - log π_old is -2, -, 1, 0, -30; the last is clipped to -10.
        assert self.mixed(weight=0.5) == [0.0, 0.0, 1.5, -1.0, -6.0]

    def test_without_rewards_the_teacher_is_alone(self) -> None:
        assert self.mixed(weight=1.0, reward_weight=0.0, max_log_ratio=30) == [-2, 0, 1, 0, -30]

    def test_the_reverse_kl_is_the_mean_of_what_was_not_clipped(self) -> None:
        found = distil(self.ragged, self.A, self.old, self.teacher, DistillationConfig(weight=1))
        assert found.metrics == {"distillation/reverse_kl": 31 / 4, "distillation/clipped": 0.25}


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 1.0, -1.0, 0.0], dtype=torch.float64).log_softmax(0)
    lp = logits.log_softmax(0)
    exact = (lp.exp() * (lp - teacher)).sum()
    # Every token as a row of its own, weighed by how often the policy says it.
    alone = Ragged.from_lengths(torch.ones(4).long(), torch.ones(4, dtype=torch.bool))
    D = distil(alone, torch.zeros(4), lp.detach(), teacher, DistillationConfig(weight=1)).advantages
    surrogate = -(lp.detach().exp() * D * lp).sum()
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (got,) = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(got, want)


class TestForwardKl:
    """Over the two likeliest of three tokens, at two places of one row of which the second was not sampled."""

    ragged = Ragged.from_lengths(torch.tensor([2]), torch.tensor([True, False]))
    teacher = torch.tensor([[0.6, 0.3], [0.5, 0.5]]).log()
    policy = torch.tensor([[0.1, 0.6], [0.2, 0.2]]).log()

    def told(self, **config: float) -> torch.Tensor:
        teaches = DistillationConfig(weight=1, top_k=2, **config)
        return forward_kl(self.policy, self.teacher, self.ragged, teaches).loss

    def test_it_is_the_sum_over_what_the_teacher_thinks_likeliest(self) -> None:
        wanted = 0.6 * np.log(0.6 / 0.1) + 0.3 * np.log(0.3 / 0.6)
        assert self.told()[0].item() == pytest.approx(wanted)

    def test_it_is_bounded_from_both_sides(self) -> None:
        assert self.told(max_log_ratio=0.5)[0] == 0.5
        turned = DistillationConfig(weight=1, top_k=2)
        assert forward_kl(self.teacher, self.policy, self.ragged, turned).loss[1] == 0

    def test_a_floor_holds_for_both(self) -> None:
        floor = float(np.log(0.4))
        wanted = 0.6 * (np.log(0.6) - floor) + 0.4 * (floor - np.log(0.6))
        assert self.told(min_log_prob=floor)[0].item() == pytest.approx(wanted)

    def test_what_both_give_to_these_tokens_is_told_of_sampled_places(self) -> None:
        found = forward_kl(
            self.policy, self.teacher, self.ragged, DistillationConfig(weight=1, top_k=2)
        )
        masses = {name: value.item() for name, value in found.metrics.items()}
        assert masses == pytest.approx(
            {"distillation/teacher_mass": 0.9, "distillation/policy_mass": 0.7}
        )


@pytest.mark.parametrize("top", [0, 3])
def test_a_policy_becomes_its_teacher_without_any_reward(
    tiny_path: Path, tmp_path: Path, world: World, top: int
) -> None:
    surer = random_hf(tiny.config(), seed=0)
    with torch.no_grad():
        surer.model.norm.weight.mul_(8)
    surer.save_pretrained(tmp_path / "teacher")
    recipe = named_algorithms.recipe_of(
        "grpo", tiny_path, "actor.optim={lr: 1.0e-2, lr_warmup_steps: 0, weight_decay: 0.0}",
        f"algorithm.distillation={{weight: 1.0, reward_weight: 0.0, top_k: {top}}}", "actor.use_kl_loss=false",
        f"reference.path={tmp_path / 'teacher'}", "rollout.n=4",
    )  # fmt: skip
    assert needs_reference(recipe)
    learner = named_algorithms.learner_of(recipe, world)
    teacher = ReferenceModel(tmp_path / "teacher", device="cpu", deterministic=True)
    apart = []
    for step in range(20):
        rows = sampled(learner, teacher, step, top)
        apart.append(named_algorithms.learn(learner, recipe, rows, step)["distillation/reverse_kl"])
    teacher.close()
    assert apart[0] > 0.1
    assert np.mean(apart[-5:]) < apart[0] / 2


def sampled(learner: Learner, teacher: ReferenceModel, step: int, top: int) -> list[Trajectory]:
    """Answers of the policy as it is, with what the teacher says of them; the reward says nothing."""
    factory: Any = AutoModelForCausalLM
    plain = factory.from_config(tiny.config(), attn_implementation="eager").eval()
    now = named_algorithms.weights(learner)
    names = {name: f"policy.hf.{name}" for name, _ in plain.named_parameters()}
    plain.load_state_dict({name: now[theirs] for name, theirs in names.items()}, strict=False)
    torch.manual_seed(step)
    tokens = torch.randint(0, tiny.VOCABULARY, (ROWS, PROMPT))
    known = torch.zeros(ROWS, PROMPT)
    with torch.no_grad():
        for _ in range(ANSWER):
            logp = plain(tokens).logits[:, -1].float().log_softmax(-1)
            drawn = torch.multinomial(logp.exp(), 1)
            tokens = torch.cat([tokens, drawn], 1)
            known = torch.cat([known, logp.gather(1, drawn)], 1)
    answers = list(tokens.numpy().astype(np.int32))
    judged = asyncio.run(teacher.judged(answers, top=top))
    mask = np.array([0] * PROMPT + [1] * ANSWER, dtype=np.uint8)
    span = VersionSpan(version=Version(1, step), start=PROMPT, end=PROMPT + ANSWER)
    return [
        Trajectory(
            uid=Uid("r", f"t{index // 4:02d}", index % 4),
            tokens=answers[index],
            loss_mask=mask,
            rollout_logprobs=known[index].numpy(),
            spans=(span,),
            reward=0.0,
            **judged[index],
        )
        for index in range(ROWS)
    ]


class TestChecks:
    """A recipe whose teacher cannot teach gets one line before anything starts."""

    TEACHES = "algorithm.distillation.weight=1"

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("my.yaml").write_text(
            "model: {path: model}\ndata: {train_files: [train.jsonl]}\nreward: {functions: [{name: exact_match}]}\n"
        )
        Path("train.jsonl").write_text('{"prompt": "ab", "answer": "2"}\n')
        words = {"model": ["a", "b"], "same": ["a", "b"], "larger": ["a", "b", "c"]}
        for name, vocabulary in {**words, "other": ["b", "a"], "bare": []}.items():
            Path(name).mkdir()
            Path(name, "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
            write_weights(Path(name, "model.safetensors"))
            if vocabulary:
                added = ["<eos>"] if name != "larger" else []
                write_tokenizer(Path(name), added, vocabulary=vocabulary)

    def said(self, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_recipe(Path("my.yaml"), overrides)
        (only,) = str(caught.value).splitlines()
        return only

    def test_a_teacher_with_the_same_words_teaches(self) -> None:
        recipe = load_recipe(Path("my.yaml"), [self.TEACHES, "reference.path=same"])
        assert needs_reference(recipe)

    def test_a_teacher_must_be_named(self) -> None:
        assert "reference.path: missing: algorithm.distillation.weight wants" in self.said(
            self.TEACHES
        )

    @pytest.mark.parametrize(("teacher", "count"), [("other", 2), ("larger", 1)])
    def test_a_teacher_with_other_words_is_refused(self, teacher: str, count: int) -> None:
        line = self.said(self.TEACHES, f"reference.path={teacher}")
        assert f"reference.path: {count} of the policy's 3 tokens have another id" in line

    def test_so_is_the_reference_of_a_kl_term(self) -> None:
        line = self.said("actor.use_kl_loss=true", "reference.path=other")
        assert "2 of the policy's 3 tokens" in line

    def test_a_teacher_without_a_tokenizer_cannot_be_compared(self) -> None:
        line = self.said(self.TEACHES, "reference.path=bare")
        assert "reference.path: bare has no tokenizer.json" in line

    @pytest.mark.parametrize("loss", ["dpo", "ipo", "spin", "sppo", "geo_mean"])
    def test_a_loss_of_whole_rows_cannot_follow_a_teacher(self, loss: str) -> None:
        line = self.said(self.TEACHES, "reference.path=same", f"actor.policy_loss.loss_mode={loss}")
        assert f"the loss {loss} reads one number of a row" in line


def test_k1_and_k3_agree_in_expectation_with_the_exact_divergence() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    exact = float((p * (p / q).log()).sum())

    for name in ("k1", "k3"):
        expected = float((p * kl_penalty(p.log(), q.log(), name)).sum())
        assert expected == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(name: str) -> None:
    ref = torch.tensor([-1.0, -2.0, -30.0])
    logprobs = torch.tensor([-1.5, -1.0, -1.0]).requires_grad_()

    plus = kl_penalty(logprobs, ref, name + "+")
    (gradient,) = torch.autograd.grad(plus.sum(), logprobs)

    torch.testing.assert_close(plus.detach(), kl_penalty(logprobs, ref, name).detach())
    torch.testing.assert_close(gradient, (logprobs - ref).detach())


def test_an_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="k1, abs"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_the_adaptive_controller_follows_the_target_and_is_bounded() -> None:
    start = KlController.start(
        KlControlConfig(type="adaptive", kl_coef=0.1, horizon=100, target_kl=1.0)
    )

    assert start.updated(100.0, 50).value == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    assert start.updated(0.0, 50).value == pytest.approx(0.1 * (1 - 0.2 * 0.5))
    assert start.updated(1.1, 50).value == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    assert KlController.start(KlControlConfig(kl_coef=0.1)).updated(100.0, 50).value == 0.1


def test_log_probs_that_are_finite_and_absurd_do_not_end_the_controller() -> None:
    ragged = Ragged.from_lengths(
        torch.tensor([3, 3]), torch.ones(6, dtype=torch.bool), torch.tensor([0, 0])
    )
    controller = KlController.start(KlControlConfig(type="adaptive", kl_coef=0.5, horizon=10))
    most = torch.finfo(torch.float32).max
    ref_logprobs = torch.tensor([most] * 3 + [-most] * 3)

    result = kl_in_reward(
        ragged, torch.zeros(6), torch.zeros(6), ref_logprobs, name="k1", controller=controller
    )

    assert math.isnan(result.current_kl)
    assert result.controller.value == 0.5


def test_the_penalty_touches_trained_tokens_only_and_uses_the_coefficient_from_before() -> None:
    ragged = Ragged.from_lengths(
        torch.tensor([2, 2]), torch.tensor([True, True, True, False]), torch.tensor([0, 0])
    )
    controller = KlController.start(KlControlConfig(type="adaptive", kl_coef=0.5, horizon=10))

    result = kl_in_reward(
        ragged,
        torch.tensor([0.0, 1.0, 1.0, 7.0]),
        torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        torch.tensor([-2.0, -1.0, -1.0, -9.0]),
        name="k1",
        controller=controller,
    )

    assert result.token_rewards.tolist() == [-0.5, 1.0, 1.0, 7.0]
    assert result.current_kl == pytest.approx(0.25)
    assert result.controller.value == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))

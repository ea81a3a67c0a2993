"""Policy losses beyond the recorded cases, and one loss of a mini-batch, however it is cut and dealt to ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from torch import Tensor

from meshrl.common import plugins
from meshrl.contract.errors import ConfigError, InfraError
from meshrl.trainer.algorithms.advantages.gae import value_loss
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._types import LossInputs, LossOutput
from meshrl.trainer.algorithms.losses.m2po import second_moment_mask
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import ActorConfig, AggregationMode
from meshrl.trainer.learner.policy_gradient import actor_loss, positive_nll

LOSSES = plugins.known("meshrl.trainer.algorithms.losses")
ON_POLICY_GRADIENT = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "kl_cov",
    "cispo",
    "m2po",
    "reinforce",
    "dro",
)


def config(**policy_loss: object) -> ActorConfig:
    return ActorConfig.model_validate({"policy_loss": policy_loss})


def rows(lengths: list[int], groups: list[int] | None = None) -> Ragged:
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    numbers = None if groups is None else torch.tensor(groups)
    return Ragged.from_lengths(torch.tensor(lengths), mask, numbers)


def pairs(scores: list[float], *, reference: Tensor | None) -> LossInputs:
    """Two rows of two tokens; the second is as likely as the first."""
    ragged = rows([2, 2], [0, 0])
    logprobs = torch.full((4,), -1.0)
    return LossInputs(
        ragged=ragged,
        logprobs=logprobs,
        old_logprobs=logprobs,
        advantages=ragged.to_tokens(torch.tensor(scores)),
        ref_logprobs=reference,
    )


def run(name: str, inputs: LossInputs, **policy_loss: object) -> LossOutput:
    compute = plugins.load("meshrl.trainer.algorithms.losses", name, "compute")
    output: LossOutput = compute(inputs, config(**policy_loss), Aggregator())
    return output


@pytest.mark.parametrize("name", ON_POLICY_GRADIENT)
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    torch.manual_seed(0)
    logprobs = (-torch.rand(9) - 0.1).requires_grad_()
    advantages = torch.randn(9)
    inputs = LossInputs(
        ragged=rows([4, 5]),
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        advantages=advantages,
    )

    loss = run(name, inputs, dro_beta=0.1).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)

    expected = -advantages / 9
    if (
        name == "gspo"
    ):  # a row's tokens share its ratio, and here its gradient per token is the same
        torch.testing.assert_close(gradient, expected)
    else:
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("far", [90.0, 1e4])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_one_token_far_from_its_old_policy_makes_no_loss_or_gradient_infinite(
    name: str, far: float, sign: float
) -> None:
    """e^89 is beyond float32: such a token made the whole update infinite, and it was skipped."""
    old = torch.full((8,), -1.0)
    apart = torch.tensor([0.0, far, 0.3, -far, 0.0, far, -0.2, -far])
    logprobs = (old + apart).requires_grad_()
    inputs = LossInputs(
        ragged=rows([4, 4], [0, 0]),
        logprobs=logprobs,
        old_logprobs=old,
        advantages=sign * torch.tensor([1.0] * 4 + [-1.0] * 4),
        ref_logprobs=old,
    )

    loss = run(name, inputs, loss_mode=name, dro_beta=0.1).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)

    assert loss.isfinite() and gradient.isfinite().all()


def test_clip_ratio_alone_moves_both_bounds() -> None:
    inputs = LossInputs(
        ragged=rows([2]),
        logprobs=torch.log(torch.tensor([1.15, 0.85])),
        old_logprobs=torch.zeros(2),
        advantages=torch.tensor([1.0, -1.0]),
    )
    narrow = ActorConfig.model_validate({"clip_ratio": 0.1})

    output = plugins.load("meshrl.trainer.algorithms.losses", "vanilla", "compute")(
        inputs, narrow, Aggregator()
    )

    assert float(output.loss) == pytest.approx((-1.1 + 0.9) / 2)
    assert float(output.metrics["actor/pg_clipfrac"]) == pytest.approx(1.0)


def test_dppo_truncates_at_twenty_by_default() -> None:
    inputs = LossInputs(
        ragged=rows([1]),
        logprobs=torch.log(torch.tensor([0.5])),
        old_logprobs=torch.log(torch.tensor([0.05])),
        advantages=torch.tensor([1.0]),
    )
    loose = ActorConfig.model_validate({"clip_ratio": 1.0})
    tight = ActorConfig.model_validate({"clip_ratio": 1.0, "clip_ratio_c": 3.0})
    compute = plugins.load("meshrl.trainer.algorithms.losses", "dppo_tv", "compute")

    loose_loss, tight_loss = (compute(inputs, c, Aggregator()).loss for c in (loose, tight))

    assert float(loose_loss / tight_loss) == pytest.approx(10 / 3, rel=1e-5)


def test_gmpo_leaves_out_rows_without_trained_tokens() -> None:
    ragged = rows([2, 2]).with_mask(torch.tensor([True, True, False, False]))
    inputs = LossInputs(
        ragged=ragged,
        logprobs=torch.zeros(4),
        old_logprobs=torch.zeros(4),
        advantages=torch.tensor([1.0, 1.0, 5.0, 5.0]),
    )

    sane = run("geo_mean", inputs).loss
    verl = plugins.load("meshrl.trainer.algorithms.losses", "geo_mean", "compute")(
        inputs, ActorConfig(conventions="verl"), Aggregator()
    ).loss

    assert float(sane) == pytest.approx(-1.0)
    assert float(verl) == pytest.approx(-0.5)


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_a_preference_loss_pushes_the_pair_apart(name: str) -> None:
    inputs = pairs([1.0, -1.0], reference=torch.full((4,), -1.0))
    leaf = inputs.logprobs.clone().requires_grad_()
    moved = LossInputs(
        ragged=inputs.ragged,
        logprobs=leaf,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        ref_logprobs=inputs.ref_logprobs,
    )

    (gradient,) = torch.autograd.grad(run(name, moved).loss, leaf)

    assert (gradient[:2] < 0).all()
    torch.testing.assert_close(gradient[2:], -gradient[:2])


def test_a_preference_loss_without_preferences_is_zero() -> None:
    assert run("dpo", pairs([0.0, 0.0], reference=torch.zeros(4))).loss == 0


def test_a_torn_pair_is_refused() -> None:
    with pytest.raises(InfraError, match="group 0 is split"):
        run("dpo", pairs([1.0, 0.0], reference=torch.zeros(4)))


def test_a_preference_loss_says_that_it_needs_a_reference() -> None:
    with pytest.raises(ConfigError, match="dpo needs ref_logprobs"):
        run("dpo", pairs([1.0, -1.0], reference=None))

    free = run("dpo", pairs([1.0, -1.0], reference=None), dpo_reference_free=True)
    assert float(free.loss) == pytest.approx(0.6931, abs=1e-4)


def test_dro_without_beta_is_refused() -> None:
    with pytest.raises(ConfigError, match="dro_beta"):
        run("dro", pairs([1.0, -1.0], reference=None))


def test_the_objective_adds_entropy_kl_and_nll() -> None:
    ragged = rows([2, 2])
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    inputs = LossInputs(
        ragged=ragged,
        logprobs=logprobs,
        old_logprobs=logprobs,
        advantages=torch.zeros(4),
        ref_logprobs=logprobs - 1,
    )
    settings = ActorConfig.model_validate(
        {
            "entropy_coeff": 0.1,
            "use_kl_loss": True,
            "kl_loss_coef": 0.5,
            "kl_loss_type": "k1",
            "policy_loss": {"positive_nll_coef": 0.1},
        }
    )

    output = actor_loss(
        inputs,
        settings,
        Aggregator(),
        entropy=torch.full((4,), 2.0),
        correct=torch.tensor([False, True]),
    )

    assert float(output.loss) == pytest.approx(-0.1 * 2 + 0.5 * 1 + 0.1 * 3.5)
    assert float(output.metrics["actor/kl_loss"]) == pytest.approx(1)
    assert float(output.metrics["actor/positive_nll"]) == pytest.approx(3.5)


def test_the_nll_counts_correct_tokens_of_the_whole_mini_batch() -> None:
    ragged = rows([2, 2])
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0])

    none = positive_nll(ragged, logprobs, torch.tensor([False, False]), Aggregator())
    shared = positive_nll(
        ragged, logprobs, torch.tensor([False, True]), Aggregator(dp_size=2, batch_num_tokens=4), 8
    )

    assert none == 0
    assert float(shared) == pytest.approx(7 / 8 * 2)


def test_a_term_without_its_input_is_named() -> None:
    with pytest.raises(ConfigError, match="use_kl_loss needs ref_logprobs"):
        actor_loss(pairs([1.0, 0.0], reference=None), ActorConfig(use_kl_loss=True), Aggregator())


def test_an_unknown_loss_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gspo'"):
        actor_loss(pairs([1.0, 0.0], reference=None), config(loss_mode="gspoo"), Aggregator())


def test_the_second_moment_mask_keeps_as_many_tokens_as_the_threshold_allows() -> None:
    ragged = rows([5]).with_mask(torch.tensor([True, True, True, True, False]))
    log_ratio = torch.tensor([0.1, -2.0, 0.3, 0.0, 0.0])

    trained = second_moment_mask(ragged, log_ratio, 0.04)

    assert trained.tolist() == [True, False, True, True, False]
    assert second_moment_mask(ragged, log_ratio, 9.0).tolist() == ragged.mask.tolist()


def test_the_value_loss_ignores_a_prediction_that_runs_away() -> None:
    ragged = rows([2])
    values = torch.tensor([0.0, 2.0]).requires_grad_()

    output = value_loss(
        ragged,
        values,
        torch.zeros(2),
        torch.tensor([1.0, 3.0]),
        cliprange_value=0.5,
        aggregate=Aggregator(),
    )
    (gradient,) = torch.autograd.grad(output.loss, values)

    assert float(output.loss.detach()) == pytest.approx(0.5 * (1 + 2.5**2) / 2)
    assert gradient.tolist() == [-0.5, 0.0]
    assert float(output.metrics["critic/vf_clipfrac"]) == 0.5


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_says_what_it_needs(name: str) -> None:
    needs = plugins.constant("meshrl.trainer.algorithms.losses", name, "NEEDS", ())

    assert set(needs) <= set(LossInputs.__dataclass_fields__)


MODES: tuple[AggregationMode, ...] = get_args(AggregationMode)
WITHIN_MICRO_BATCH = {"clip_cov", "kl_cov", "m2po"}
"""Losses that choose tokens within a micro-batch, as their documentation says."""
ACROSS_MICRO_BATCHES = [
    name
    for name in plugins.known("meshrl.trainer.algorithms.losses")
    if name not in WITHIN_MICRO_BATCH
]
GROUPS, N = 6, 2
SPLITS = [[6], [1] * 6, [2, 4], [3, 1, 2]]


@pytest.fixture
def batch() -> LossInputs:
    """Twelve rows of six prompts; one row has no trained token, one no token at all."""
    torch.manual_seed(3)
    lengths = torch.tensor([7, 3, 1, 12, 5, 5, 0, 9, 4, 2, 8, 6])
    tokens = int(lengths.sum())
    mask = torch.rand(tokens) > 0.3
    mask[int(lengths[:4].sum()) : int(lengths[:5].sum())] = False
    mask[int(lengths[:5].sum())] = True
    ragged = Ragged.from_lengths(lengths, mask, torch.arange(GROUPS).repeat_interleave(N))
    sign = torch.tensor([1.0, -1.0]).repeat(GROUPS)
    sign[4:8] = 0
    old = -torch.rand(tokens) - 0.1
    return LossInputs(
        ragged=ragged,
        logprobs=old + 0.3 * torch.randn(tokens),
        old_logprobs=old,
        advantages=ragged.to_tokens(sign * (0.5 + torch.rand(12))),
        rollout_is_weights=torch.rand(tokens) + 0.5,
        ref_logprobs=-torch.rand(tokens),
    )


def rows_of(inputs: LossInputs, rows: range, logprobs: Tensor) -> LossInputs:
    """The micro-batch of some rows; `logprobs` is the leaf that collects the gradient."""
    ragged = inputs.ragged
    start, end = int(ragged.offsets[rows.start]), int(ragged.offsets[rows.stop])
    part = slice(start, end)
    assert inputs.rollout_is_weights is not None
    assert inputs.ref_logprobs is not None
    return LossInputs(
        ragged=Ragged.from_lengths(
            ragged.lengths[rows.start : rows.stop],
            ragged.mask[part],
            ragged.groups[rows.start : rows.stop] - ragged.groups[rows.start],
        ),
        logprobs=logprobs[part],
        old_logprobs=inputs.old_logprobs[part],
        advantages=inputs.advantages[part],
        rollout_is_weights=inputs.rollout_is_weights[part],
        ref_logprobs=inputs.ref_logprobs[part],
    )


def micro_batches(split: list[int]) -> Iterator[range]:
    ends = list(itertools.accumulate(size * N for size in split))
    return (range(end - size * N, end) for size, end in zip(split, ends, strict=True))


def trained(
    inputs: LossInputs, config: ActorConfig, split: list[int], ranks: int
) -> tuple[Tensor, Tensor]:
    """Loss and gradient after every rank's micro-batches, gradients averaged over ranks."""
    aggregate = Aggregator.for_batch(
        config,
        batch_num_tokens=int(inputs.ragged.num_valid),
        global_batch_size=int(inputs.ragged.nonempty.sum()),
        max_response_length=12,
        dp_size=ranks,
    )
    leaf = inputs.logprobs.clone().requires_grad_()
    losses = [
        actor_loss(part, config, aggregate, entropy=-part.logprobs).loss
        for part in (rows_of(inputs, rows, leaf) for rows in micro_batches(split))
    ]
    total = torch.stack(losses).sum() / ranks
    total.backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_mode", ACROSS_MICRO_BATCHES)
def test_the_loss_does_not_depend_on_the_split_or_the_world(
    batch: LossInputs, mode: AggregationMode, loss_mode: str
) -> None:
    config = ActorConfig.model_validate(
        {
            "loss_agg_mode": mode,
            "entropy_coeff": 0.01,
            "use_kl_loss": True,
            "policy_loss": {"loss_mode": loss_mode, "dro_beta": 0.1},
        }
    )
    loss, gradient = trained(batch, config, [GROUPS], ranks=1)
    assert gradient.abs().sum() > 0

    for split, ranks in itertools.product(SPLITS, (1, 2, 3)):
        other_loss, other_gradient = trained(batch, config, split, ranks)

        torch.testing.assert_close(other_loss, loss, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(other_gradient, gradient, rtol=2e-6, atol=1e-7)


def test_a_rank_without_trained_tokens_contributes_zero() -> None:
    ragged = Ragged.from_lengths(torch.tensor([2, 0]), torch.zeros(2, dtype=torch.bool))
    loss = torch.ones(2)

    for mode in MODES:
        aggregate = Aggregator(mode=mode, loss_scale_factor=8.0)
        assert aggregate(loss, ragged) == 0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8),
        ("seq-mean-token-mean", (2 + 10) / 2),
    ],
)
def test_each_mode_weighs_as_its_name_says(mode: AggregationMode, expected: float) -> None:
    mask = torch.tensor([1, 1, 1, 0, 1, 0, 0]).bool()
    ragged = Ragged.from_lengths(torch.tensor([3, 2, 2]), mask)
    loss = torch.tensor([1.0, 2, 3, torch.nan, 10, torch.inf, 99])

    total = Aggregator(mode=mode, loss_scale_factor=8.0)(loss, ragged)

    assert float(total) == pytest.approx(expected)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "seq-mean-token-sum-norm"},
        {"mode": "token-mean", "dp_size": 2},
        {"mode": "seq-mean-token-mean", "dp_size": 2},
    ],
)
def test_an_aggregation_that_would_depend_on_the_split_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="needs"):
        Aggregator(**wrong)  # type: ignore[arg-type]

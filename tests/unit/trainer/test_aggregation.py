"""A mini-batch has one loss, however it is cut into micro-batches and dealt to ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from torch import Tensor

from meshrl.common import plugins
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._types import LossInputs
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import ActorConfig, AggregationMode
from meshrl.trainer.learner.policy_gradient import actor_loss

MODES: tuple[AggregationMode, ...] = get_args(AggregationMode)
WITHIN_MICRO_BATCH = {"clip_cov", "kl_cov", "m2po"}
"""Losses that choose tokens within a micro-batch, as their documentation says."""
LOSSES = [
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
@pytest.mark.parametrize("loss_mode", LOSSES)
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

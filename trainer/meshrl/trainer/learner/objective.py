"""The actor's whole objective: policy loss, entropy bonus, KL to the reference, NLL on correct answers.

    loss = pg - c_entropy · agg(H) + c_kl · agg(KL(π_θ, π_ref)) + c_nll · NLL(correct rows)

All terms share the aggregation, so each is the same for every split of the batch.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from meshrl.common import plugins
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.kl import kl_penalty
from meshrl.trainer.algorithms.losses._types import LossInputs, LossOutput, need
from meshrl.trainer.algorithms.needs import LOSSES
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import ActorConfig


def actor_loss(
    inputs: LossInputs,
    config: ActorConfig,
    aggregate: Aggregator,
    *,
    entropy: Tensor | None = None,
    correct: Tensor | None = None,
    correct_num_tokens: int | None = None,
) -> LossOutput:
    """The scalar to differentiate for one micro-batch.

    Args:
        inputs: The micro-batch.
        config: Which loss, and the coefficients.
        aggregate: Of the mini-batch.
        entropy: float32[N]; needed when `entropy_coeff` is not 0, reported whenever it is given.
        correct: bool[B], rows with a right answer; needed when `positive_nll_coef` is not 0.
        correct_num_tokens: Trained tokens of correct rows of the mini-batch over all ranks.

    Raises:
        ConfigError: an unknown loss, or one that lacks an input.
    """
    compute = plugins.load(LOSSES, config.policy_loss.loss_mode, "compute")
    output: LossOutput = compute(inputs, config, aggregate)
    ragged, loss, metrics = inputs.ragged, output.loss, dict(output.metrics)
    metrics["actor/pg_loss"] = output.loss.detach()
    if entropy is not None:
        metrics["actor/entropy"] = ragged.token_mean(entropy.detach())
    if config.entropy_coeff:
        loss = loss - config.entropy_coeff * aggregate(
            need(entropy, "entropy", "entropy_coeff"), ragged
        )
    if config.use_kl_loss:
        reference = need(inputs.ref_logprobs, "ref_logprobs", "use_kl_loss")
        kl = kl_penalty(inputs.logprobs, reference, config.kl_loss_type)
        kl_loss = aggregate(kl, ragged)
        metrics["actor/kl_loss"] = kl_loss.detach()
        loss = loss + config.kl_loss_coef * kl_loss
    if config.policy_loss.positive_nll_coef:
        rows = need(correct, "correct rows", "positive_nll_coef")
        nll = positive_nll(ragged, inputs.logprobs, rows, aggregate, correct_num_tokens)
        metrics["actor/positive_nll"] = nll.detach()
        loss = loss + config.policy_loss.positive_nll_coef * nll
    return LossOutput(loss=loss, metrics=metrics)


def positive_nll(
    ragged: Ragged,
    logprobs: Tensor,
    correct: Tensor,
    aggregate: Aggregator,
    correct_num_tokens: int | None = None,
) -> Tensor:
    """-mean log π_θ over the trained tokens of correct rows bool[B] (VAPO, arXiv 2504.05118).

    Without the global count `correct_num_tokens` the rows at hand are counted; 0 without correct rows.
    """
    chosen = ragged.with_mask(ragged.mask & correct[ragged.rows])
    if correct_num_tokens is not None:
        correct_num_tokens = max(1, correct_num_tokens)
    over_tokens = dataclasses.replace(
        aggregate, mode="token-mean", batch_num_tokens=correct_num_tokens
    )
    return over_tokens(-torch.where(chosen.mask, logprobs, 0.0), chosen)

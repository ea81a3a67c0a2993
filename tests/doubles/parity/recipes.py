"""Adapters of the recipes: PRIME, SPPO, SPIN / online DPO, GiGPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch

from meshrl.trainer.algorithms.advantages import gigpo, preference, prime, sppo
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch
from meshrl.trainer.algorithms.advantages.grpo import group_relative
from meshrl.trainer.algorithms.advantages.prime import row_cross_entropy
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses import dpo, ipo
from meshrl.trainer.algorithms.losses import sppo as sppo_loss
from meshrl.trainer.algorithms.losses._types import LossInputs
from meshrl.trainer.algorithms.ragged import Ragged, variance
from meshrl.trainer.config import ActorConfig, AlgorithmConfig
from tests.doubles.parity.cases import Array, Case
from tests.doubles.parity.layout import Found, flat, padded, ragged_of
from tests.doubles.parity.statistics import token_logprobs

IGNORED = -100
"""Label of a token that is not scored."""
BestOfN = Literal["none", "bon_acc", "bon_rm"]


def _numbers(labels: Array) -> torch.Tensor:
    return torch.from_numpy(np.unique(labels, return_inverse=True)[1].reshape(len(labels)))


def _gigpo(case: Case) -> Found:
    k = case.kwargs
    batch = AdvantageBatch(
        ragged=ragged_of(case),
        token_rewards=flat(case, "token_level_rewards"),
        trajectories=_numbers(case.inputs["traj_index"]),
        anchors=_numbers(case.inputs["anchor_obs"]),
    )
    divide = k.get("mode", "mean_norm") == "mean_std_norm"
    episode = group_relative(batch.ragged, batch.scores, divide_by_std=divide, conventions="verl")
    anchors = _numbers(case.inputs["anchor_obs"])
    step = gigpo.step_relative(
        batch.ragged, case.tensor("step_rewards"), anchors, divide_by_std=divide
    )
    rows = episode + k.get("step_advantage_w", 1.0) * step
    return Found(outputs={"advantages": padded(batch.ragged.to_tokens(rows.float()), case)})


def _step_returns(case: Case) -> Found:
    episodes = _numbers(case.inputs["traj_uid"])
    returns = gigpo.step_returns(case.tensor("rewards"), episodes, gamma=case.kwargs["gamma"])
    return Found(outputs={"step_returns": returns})


def _prime_advantage(case: Case) -> Found:
    k = case.kwargs
    mask = case.tensor("response_mask")
    groups = torch.arange(len(mask)) // k["n_samples"]
    acc = case.tensor("acc")
    batch = AdvantageBatch(
        ragged=Ragged.from_padded(mask, groups),
        token_rewards=torch.zeros(mask.numel()),
        implicit_rewards=flat(case, "rm_scores"),
        reward_components={prime.ACCURACY: acc},
    )
    coefficients = {key: k[key] for key in ("reward_dpo_coef", "reward_gt_coef")}
    result = prime.compute(batch, AlgorithmConfig.model_validate({"prime": coefficients}))
    R = result.returns
    # The recipe whitens padding too, and its record compares it; ours is 0 there.
    floor = -batch.ragged.token_mean(R) * torch.rsqrt(variance(batch.ragged, R) + 1e-8)
    A = torch.where(batch.ragged.mask, result.advantages, floor)
    return Found(outputs={"advantages": padded(A, case), "returns": padded(R, case)})


def _cross_entropy(case: Case) -> Found:
    q = flat(case, "q").requires_grad_()
    losses = row_cross_entropy(ragged_of(case), q, case.tensor("acc"), beta=case.kwargs["beta"])
    loss = losses.mean()
    (gradient,) = torch.autograd.grad(loss, q)
    return Found(outputs={"loss": loss, "grad_q": padded(gradient, case)})


def detached_dpo(
    ragged: Ragged,
    q: torch.Tensor,
    acc: torch.Tensor,
    sibling_q: torch.Tensor,
    sibling_acc: torch.Tensor,
    *,
    beta: float,
    best_of_n: BestOfN = "none",
) -> torch.Tensor:
    """-log σ(±(β Q - β mean Q_others)): a row against the detached rows of its prompt with the other outcome.

    Args:
        ragged: B rows.
        q: [N].
        acc: [B], 0 or 1.
        sibling_q: [B, n], Σ_t q_t of the n rows of each row's prompt.
        sibling_acc: [B, n].
        beta: β.
        best_of_n: `none` averages over rows; otherwise rows are weighed by the density of being the best of n,
            n · F^(n-1) with F the share of siblings that are no better in accuracy or in reward, and summed.
    """
    Q = beta * ragged.row_sum(q)
    correct = (acc > 0).unsqueeze(1)
    other = torch.where(correct, sibling_acc < acc[:, None], sibling_acc > acc[:, None])
    count = other.sum(1)
    others = beta * (sibling_q * other).sum(1) / count.clamp(min=1)
    sign = (acc > 0).to(Q.dtype) * 2 - 1
    loss = -torch.nn.functional.logsigmoid((Q - others) * sign)
    if best_of_n == "none":
        return loss.mean()
    n = sibling_acc.shape[1]
    by_accuracy = best_of_n == "bon_acc"
    no_better = sibling_acc <= acc[:, None] if by_accuracy else beta * sibling_q <= Q[:, None]
    return (loss * n * no_better.to(Q.dtype).mean(1).pow(n - 1)).sum()


def _detached_dpo(case: Case) -> Found:
    q = flat(case, "q").requires_grad_()
    loss = detached_dpo(
        ragged_of(case),
        q,
        case.tensor("acc"),
        case.tensor("Q_bc"),
        case.tensor("acc_bc"),
        beta=case.kwargs["beta"],
        best_of_n=case.kwargs.get("bon_mode", "none"),
    )
    (gradient,) = torch.autograd.grad(loss, q)
    return Found(outputs={"loss": loss, "grad_q": padded(gradient, case)})


def _batch_logprobs(case: Case) -> Found:
    """The labels are shifted by one, as a causal model predicts them."""
    logits, labels = case.tensor("logits")[:, :-1], case.tensor("labels")[:, 1:]
    mask = labels != IGNORED
    logprobs = token_logprobs(logits, torch.where(mask, labels, 0))[0].reshape(-1)
    ragged = Ragged.from_padded(mask)
    average = case.kwargs.get("average_log_prob", False)
    return Found(outputs={"logps": (ragged.row_mean if average else ragged.row_sum)(logprobs)})


def _online_dpo(case: Case) -> Found:
    """Sequence log-probs as rows of one token, chosen and rejected in turn."""
    k = case.kwargs
    chosen = case.tensor("policy_chosen_logps").requires_grad_()
    rejected = case.tensor("policy_rejected_logps").requires_grad_()
    reference = [case.tensor(f"reference_{side}_logps") for side in ("chosen", "rejected")]
    pairs = len(chosen)
    rows = torch.cat([chosen, rejected])
    inputs = LossInputs(
        ragged=Ragged.from_lengths(
            torch.ones(2 * pairs, dtype=torch.int64),
            torch.ones(2 * pairs, dtype=torch.bool),
            torch.arange(pairs).repeat(2),
        ),
        logprobs=rows,
        old_logprobs=rows.detach(),
        advantages=torch.cat([torch.ones(pairs), -torch.ones(pairs)]),
        ref_logprobs=torch.cat(reference),
    )
    settings = {
        "dpo_beta": k["beta"],
        "dpo_label_smoothing": k.get("label_smoothing", 0.0),
        "dpo_reference_free": k.get("reference_free", False),
    }
    config = ActorConfig.model_validate({"policy_loss": settings})
    kind = {"sigmoid": dpo, "ipo": ipo}[k.get("loss_type", "sigmoid")]
    loss = kind.compute(inputs, config, Aggregator()).loss
    gradients = torch.autograd.grad(loss, (chosen, rejected))
    return Found(outputs={"loss": loss, "grad_chosen": gradients[0], "grad_rejected": gradients[1]})


def _preference(case: Case) -> Found:
    """Pairs are consecutive rows; only trained tokens' rewards count."""
    mask = case.tensor("response_mask")
    ragged = Ragged.from_padded(mask, torch.arange(len(mask)) // 2)
    scores = ragged.row_sum(flat(case, "token_level_rewards"))
    return Found(outputs={"chosen": preference.choose(ragged, scores, ties=True) > 0})


def _sppo_advantage(case: Case) -> Found:
    """One soft mean over the whole batch."""
    rewards = case.tensor("token_level_rewards")
    ragged = Ragged.from_padded(torch.ones_like(rewards), torch.zeros(len(rewards)).long())
    s = ragged.row_sum(rewards.reshape(-1).double())
    mean = sppo.soft_mean(ragged, s, case.kwargs["beta"])
    return Found(outputs={"seq_level_rewards": (s - mean).float()})


def _sppo_loss(case: Case) -> Found:
    ragged = ragged_of(case)
    logprobs, old = flat(case, "log_prob").requires_grad_(), flat(case, "old_log_prob")
    inputs = LossInputs(
        ragged=ragged,
        logprobs=logprobs,
        old_logprobs=old,
        advantages=ragged.to_tokens(case.tensor("rewards")),
    )
    config = ActorConfig.model_validate({"policy_loss": {"sppo_eta": case.kwargs["eta"]}})
    loss = sppo_loss.compute(inputs, config, Aggregator()).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    log_ratios = ragged.row_sum((logprobs - old).detach())
    return Found(
        outputs={
            "loss": loss,
            "log_ratios": log_ratios,
            "grad_log_prob": padded(gradient, case),
        }
    )


ADAPTERS: Mapping[str, Callable[[Case], Found]] = {
    "compute_gigpo_outcome_advantage": _gigpo,
    "compute_step_discounted_returns": _step_returns,
    "compute_rloo_advantage_return": _prime_advantage,
    "compute_ce_dpo_loss_rm": _cross_entropy,
    "compute_detach_dpo_loss_rm": _detached_dpo,
    "get_batch_logps": _batch_logprobs,
    "compute_online_dpo_loss": _online_dpo,
    "compute_onlinedpo_pref": _preference,
    "compute_advantage": _sppo_advantage,
    "compute_sppo_loss": _sppo_loss,
}

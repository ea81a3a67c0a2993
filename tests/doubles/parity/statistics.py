"""Adapters of log-probs, entropies, masked statistics and the overlong penalty."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from meshrl.trainer.algorithms.advantages.optimal_token_baseline import sum_pi_squared
from meshrl.trainer.algorithms.ragged import Ragged, variance, whiten
from meshrl.trainer.algorithms.recipes.dapo import overlong_penalty
from meshrl.trainer.model.logprob import linear_logprob
from tests.doubles.parity.cases import Case
from tests.doubles.parity.layout import Found, flat, group_numbers, padded, ragged_of

FUNCTIONAL = "verl.utils.torch_functional."


def token_logprobs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [...] of logits [..., V] through the projection that training uses."""
    vocabulary = logits.shape[-1]
    logprobs, entropies = linear_logprob(
        logits.reshape(-1, vocabulary), torch.eye(vocabulary), labels.reshape(-1)
    )
    return logprobs.reshape(labels.shape), entropies.reshape(labels.shape)


def token_entropy(logits: Tensor) -> Tensor:
    """Entropies [...] of logits [..., V]."""
    return token_logprobs(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))[1]


def _logprobs(case: Case) -> Found:
    logprobs = token_logprobs(case.tensor("logits"), case.tensor("labels"))[0]
    return Found(outputs={"logprobs": logprobs})


def _entropy(case: Case) -> Found:
    return Found(outputs={"entropy": token_entropy(case.tensor("logits"))})


def _entropy_in_chunks(case: Case) -> Found:
    """Verl's own formula, lse(z) - Σ softmax(z) z, in float32.

    It cancels for near-certain tokens: at logits of 60 it is off by 1.4e-6, and processors differ by 2e-6. So it is
    compared to 4e-6, a unit in the last place of 60. Training's entropy, 1.5e-7 from the float64 value, is held
    against `entropy_from_logits` instead.
    """
    z = case.tensor("logits").float()
    entropy = torch.logsumexp(z, -1) - (torch.softmax(z, -1) * z).sum(-1)
    return Found(outputs={"entropy": entropy})


def _sum_pi_squared(case: Case) -> Found:
    return Found(outputs={"sum_pi_squared": sum_pi_squared(case.tensor("logits"))})


def _masked(case: Case) -> Found:
    ragged, values = ragged_of(case, mask="mask"), flat(case, "values")
    over_rows = case.kwargs.get("axis") is not None
    match case.function.rpartition(".")[2]:
        case "masked_sum":
            out = ragged.row_sum(values) if over_rows else ragged.token_sum(values)
        case "masked_mean":
            out = ragged.row_mean(values) if over_rows else ragged.token_mean(values)
        case "masked_var":
            centred = (values - ragged.token_mean(values)).square()
            unbiased = case.kwargs.get("unbiased", True)
            out = variance(ragged, values) if unbiased else ragged.token_mean(centred)
        case _:
            white = whiten(ragged, values, shift_mean=case.kwargs.get("shift_mean", True))
            out = padded(white, case, "mask")
    return Found(outputs={"out": out})


def _group_mean_std(case: Case) -> Found:
    """Mean 0 and std 1 below two rows, and a floor under the variance, as verl has it."""
    scores, groups = case.tensor("scores"), case.tensor("gidx").long()
    ones = torch.ones_like(groups)
    ragged = Ragged.from_lengths(ones, ones.bool(), groups)
    several = ragged.group_counts > 1
    floor = case.kwargs.get("eps", 1e-6)
    std = ragged.group_std(scores).square().clamp(min=floor).sqrt()
    return Found(
        outputs={
            "mean": torch.where(several, ragged.group_mean(scores), 0.0),
            "std": torch.where(several, std, 1.0),
            "count": ragged.group_counts.float(),
        }
    )


def _index(case: Case) -> Found:
    numbers = group_numbers(next(iter(case.inputs.values())))
    return Found(outputs=dict.fromkeys(case.outputs, numbers))


def _overlong(case: Case) -> Found:
    k = case.kwargs
    penalty = overlong_penalty(
        case.tensor("valid_response_length"),
        max_response_length=k["max_resp_len"],
        buffer=k["len"],
        factor=k["penalty_factor"],
    )
    return Found(outputs={"reward_score": k["base_score"] + penalty})


ADAPTERS: Mapping[str, Callable[[Case], Found]] = {
    FUNCTIONAL + "logprobs_from_logits": _logprobs,
    FUNCTIONAL + "logprobs_from_logits_naive": _logprobs,
    FUNCTIONAL + "logprobs_from_logits_v2": _logprobs,
    FUNCTIONAL + "entropy_from_logits": _entropy,
    FUNCTIONAL + "entropy_from_logits_with_chunking": _entropy_in_chunks,
    FUNCTIONAL + "calculate_sum_pi_squared_from_logits": _sum_pi_squared,
    FUNCTIONAL + "masked_sum": _masked,
    FUNCTIONAL + "masked_mean": _masked,
    FUNCTIONAL + "masked_var": _masked,
    FUNCTIONAL + "masked_whiten": _masked,
    "verl.utils.group_mean_std": _group_mean_std,
    "verl.utils.groupwise.group_mean_std": _group_mean_std,
    "verl.utils.as_torch_index": _index,
    "verl.utils.groupwise.as_torch_index": _index,
    "verl.experimental.reward_loop.reward_manager.dapo.DAPORewardManager.run_single": _overlong,
}

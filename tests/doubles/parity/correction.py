"""Adapters of KL, KL in the reward, rollout correction and resampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshrl.trainer.algorithms.kl import KlController, kl_in_reward, kl_penalty
from meshrl.trainer.algorithms.recipes.pf_ppo import resample
from meshrl.trainer.algorithms.rollout_correction import (
    correct,
    importance_weights,
    mismatch_metrics,
    parse,
    reject,
)
from meshrl.trainer.config import KlControlConfig, PfPpoConfig
from tests.doubles.parity.cases import Case
from tests.doubles.parity.layout import Found, correction_config, flat, padded, ragged_of

CORE = "verl.trainer.ppo.core_algos."
HELPER = "verl.trainer.ppo.rollout_corr_helper."


def _kl(case: Case) -> Found:
    logprobs = case.tensor("logprob").requires_grad_()
    kl = kl_penalty(logprobs, case.tensor("ref_logprob"), case.kwargs["kl_penalty"])
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    return Found(outputs={"kl": kl, "grad_of_sum": gradient})


def _rewards(case: Case) -> Found:
    kl = kl_penalty(case.tensor("old_log_prob"), case.tensor("ref_log_prob"), "kl")
    return Found(
        outputs={"rewards": case.tensor("token_level_scores") - kl * case.kwargs["kl_ratio"]}
    )


def _controller(fields: Mapping[str, Any]) -> KlController:
    known = {key: value for key, value in fields.items() if key != "_class"}
    return KlController.start(KlControlConfig.model_validate(known))


def _controller_trace(case: Case) -> Found:
    controller = _controller(case.kwargs["kl_ctrl"])
    trace = [controller.value]
    for kl, rows in zip(case.inputs["current_kl"], case.inputs["n_steps"], strict=True):
        controller = controller.updated(float(kl), int(rows))
        trace.append(controller.value)
    return Found(outputs={"value_trace": torch.tensor(trace, dtype=torch.float64)})


def _apply_penalty(case: Case) -> Found:
    controller = _controller(case.kwargs["kl_ctrl"])
    result = kl_in_reward(
        ragged_of(case),
        flat(case, "token_level_scores"),
        flat(case, "old_log_probs"),
        flat(case, "ref_log_prob"),
        name=case.kwargs.get("kl_penalty", "kl"),
        controller=controller,
    )
    return Found(
        outputs={"token_level_rewards": padded(result.token_rewards, case)},
        metrics={
            "actor/reward_kl_penalty": result.current_kl,
            "actor/reward_kl_penalty_coeff": controller.value,
            "kl_ctrl_value_after": result.controller.value,
        },
    )


def _weights(case: Case) -> Found:
    k = case.kwargs
    weights, metrics = importance_weights(
        ragged_of(case),
        flat(case, "log_ratio"),
        level=k.get("rollout_is", "token"),
        threshold=k.get("rollout_is_threshold", 2.0),
        batch_normalize=k.get("rollout_is_batch_normalize", False),
    )
    refuse_no_weight(metrics, "rollout_is_eff_sample_size")
    return Found(outputs={"rollout_is_weights": padded(weights, case)}, metrics=metrics)


def refuse_no_weight(metrics: Mapping[str, float], name: str) -> None:
    """Verl divides by 0 where every weight is 0; we report an effective sample size of 0."""
    if metrics.get(name) == 0:
        raise ZeroDivisionError(f"{name} is 0: all weights are")


def _rejection(case: Case) -> Found:
    k = case.kwargs
    criteria = parse(k.get("rollout_rs", "token_k1"), k.get("rollout_rs_threshold"))
    mask, metrics = reject(ragged_of(case), flat(case, "log_ratio"), criteria)
    return Found(outputs={"modified_response_mask": padded(mask, case)}, metrics=metrics)


def _correction(case: Case) -> Found:
    k = {"rollout_is": None, **case.kwargs}
    result = correct(
        ragged_of(case),
        flat(case, "old_log_prob"),
        flat(case, "rollout_log_prob"),
        correction_config(k),
    )
    refuse_no_weight(result.metrics, "rollout_corr/rollout_is_eff_sample_size")
    weights = {} if result.weights is None else {"rollout_is_weights": padded(result.weights, case)}
    return Found(
        outputs={"modified_response_mask": padded(result.mask, case), **weights},
        metrics=result.metrics,
    )


def _mismatch(case: Case) -> Found:
    old, rollout = flat(case, "old_log_prob"), flat(case, "rollout_log_prob")
    return Found(metrics=mismatch_metrics(ragged_of(case), old, rollout))


def _resample(case: Case) -> Found:
    config = PfPpoConfig.model_validate(dict(case.kwargs))
    scores = case.tensor("token_level_scores").sum(-1)
    return Found(outputs={"sample_indices": resample(scores, config)})


ADAPTERS: Mapping[str, Callable[[Case], Found]] = {
    CORE + "kl_penalty": _kl,
    CORE + "kl_penalty_forward": _kl,
    CORE + "compute_rewards": _rewards,
    CORE + "get_kl_controller": _controller_trace,
    CORE + "compute_pf_ppo_reweight_data": _resample,
    "verl.trainer.ppo.ray_trainer.apply_kl_penalty": _apply_penalty,
    HELPER + "compute_rollout_correction_weights": _weights,
    HELPER + "compute_rollout_rejection_mask": _rejection,
    HELPER + "compute_rollout_correction_and_rejection_mask": _correction,
    HELPER + "compute_offpolicy_metrics": _mismatch,
}

"""Adapters of the advantage estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from meshrl.common import plugins
from meshrl.trainer.algorithms.advantages import gpg, grpo
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch
from meshrl.trainer.config import AlgorithmConfig
from tests.doubles.parity.cases import Case
from tests.doubles.parity.layout import Found, flat, optional_flat, padded, ragged_of

CORE = "verl.trainer.ppo.core_algos."
NAMES = {
    "compute_gae_advantage_return": "gae",
    "compute_grpo_passk_outcome_advantage": "grpo_passk",
    "compute_gdpo_outcome_advantage": "gdpo",
    "compute_reinforce_plus_plus_baseline_outcome_advantage": "reinforce_plus_plus_baseline",
    "compute_reinforce_plus_plus_outcome_advantage": "reinforce_plus_plus",
    "compute_rloo_outcome_advantage": "rloo",
    "compute_rloo_vectorized_outcome_advantage": "rloo_vectorized",
    "compute_opo_outcome_advantage": "opo",
    "compute_remax_outcome_advantage": "remax",
    "compute_optimal_token_baseline_advantage": "optimal_token_baseline",
    "compute_multi_turn_optimal_token_baseline_advantage": "tir_optimal_token_baseline",
}
CONFIG_KEYS = (
    "norm_adv_by_std_in_grpo",
    "gamma",
    "lam",
    "gdpo_reward_keys",
    "gdpo_reward_weights",
)
COMPONENT = "non_tensor_batch."


def _config(case: Case, **changes: object) -> AlgorithmConfig:
    recorded = {**case.config(), **case.kwargs}
    fields = {key: recorded[key] for key in CONFIG_KEYS if recorded.get(key) is not None}
    if "handle_zero_tail" in case.kwargs:
        fields["otb_handle_zero_tail"] = case.kwargs["handle_zero_tail"]
    return AlgorithmConfig.model_validate({**fields, "conventions": "verl", **changes})


def _batch(case: Case, labels: str = "index") -> AdvantageBatch:
    return AdvantageBatch(
        ragged=ragged_of(case, labels=labels),
        token_rewards=flat(case, "token_level_rewards"),
        values=optional_flat(case, "values"),
        old_logprobs=optional_flat(case, "old_log_probs"),
        sum_pi_squared=optional_flat(case, "sum_pi_squared"),
        rollout_is_weights=optional_flat(case, "rollout_is_weights"),
        reward_baselines=case.optional("reward_baselines"),
        reward_components={
            name.removeprefix(COMPONENT): case.tensor(name)
            for name in case.inputs
            if name.startswith(COMPONENT)
        },
    )


def _found(case: Case, advantages: Tensor, returns: Tensor | None = None) -> Found:
    returns = advantages if returns is None else returns
    return Found(outputs={"advantages": padded(advantages, case), "returns": padded(returns, case)})


def _by_name(name: str) -> Callable[[Case], Found]:
    def adapter(case: Case) -> Found:
        compute = plugins.load("meshrl.trainer.algorithms.advantages", name, "compute")
        result = compute(_batch(case), _config(case, adv_estimator=name))
        return _found(case, result.advantages, result.returns)

    return adapter


def _grpo(case: Case) -> Found:
    """GRPO and its vectorised twin, whose ε is recorded."""
    batch = _batch(case)
    rows = grpo.group_relative(
        batch.ragged,
        batch.scores,
        divide_by_std=case.kwargs.get("norm_adv_by_std_in_grpo", True),
        conventions="verl",
        epsilon=case.kwargs.get("epsilon", grpo.EPSILON),
    )
    return _found(case, batch.ragged.to_tokens(rows.float()))


def _gpg(case: Case) -> Found:
    """GPG, whose f_norm is recorded; the recorded alpha is not read by verl either."""
    batch = _batch(case)
    rows = gpg.rescaled(
        batch.ragged, batch.scores, conventions="verl", f_norm=case.kwargs.get("f_norm", 1.0)
    )
    return _found(case, batch.ragged.to_tokens(rows.float()))


def _multi_output(case: Case) -> Found:
    """GRPO over the last output of each session; keys are `uid_session_output`."""
    name = case.kwargs["adv_estimator"]
    batch = _batch(case, labels="uid")
    if name != "grpo":
        return _by_name(name)(case)
    sessions: dict[str, int] = {}
    labels, turns = [], []
    for key in case.kwargs["batch_keys"]:
        session, _, turn = key.rpartition("_")
        labels.append(sessions.setdefault(session, len(sessions)))
        turns.append(int(turn))
    rows = grpo.last_of_each(
        batch.ragged,
        batch.scores,
        torch.tensor(labels),
        torch.tensor(turns),
        divide_by_std=case.kwargs.get("norm_adv_by_std_in_grpo", True),
        conventions="verl",
    )
    return _found(case, batch.ragged.to_tokens(rows.float()))


ADAPTERS: Mapping[str, Callable[[Case], Found]] = {
    **{CORE + function: _by_name(name) for function, name in NAMES.items()},
    CORE + "compute_grpo_outcome_advantage": _grpo,
    CORE + "compute_grpo_vectorized_outcome_advantage": _grpo,
    CORE + "compute_gpg_outcome_advantage": _gpg,
    "verl.trainer.ppo.v1.utils.compute_advantage_for_multi_trajectories": _multi_output,
}

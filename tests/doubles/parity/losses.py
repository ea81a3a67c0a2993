"""Adapters of policy losses, value loss, entropy loss and aggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshrl.common import plugins
from meshrl.trainer.algorithms.advantages.gae import value_loss
from meshrl.trainer.algorithms.losses import vanilla
from meshrl.trainer.algorithms.losses._types import LossInputs, LossOutput
from meshrl.trainer.algorithms.ragged import Ragged
from tests.doubles.parity.cases import Case
from tests.doubles.parity.correction import refuse_no_weight
from tests.doubles.parity.layout import (
    ACTOR_DEFAULTS,
    Found,
    actor_config,
    aggregator,
    flat,
    optional_flat,
    padded,
    ragged_of,
)
from tests.doubles.parity.statistics import token_entropy

CORE = "verl.trainer.ppo.core_algos."
LOSSES = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "bypass_mode",
    "reinforce",
)
DEFAULT_MODES: Mapping[str, Any] = {
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "reinforce": "seq-mean-token-sum",
}
"""Defaults of recorded functions that are not token-mean."""


def _inputs(case: Case, ragged: Ragged, old: str) -> LossInputs:
    return LossInputs(
        ragged=ragged,
        logprobs=flat(case, "log_prob").requires_grad_(),
        old_logprobs=flat(case, old),
        advantages=flat(case, "advantages"),
        rollout_is_weights=optional_flat(case, "rollout_is_weights"),
    )


def _found(case: Case, inputs: LossInputs, output: LossOutput) -> Found:
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    return Found(
        outputs={"loss": output.loss, "grad_log_prob": padded(gradient, case)},
        metrics={name: float(value) for name, value in output.metrics.items()},
    )


def _by_name(name: str) -> Callable[[Case], Found]:
    def adapter(case: Case) -> Found:
        compute = plugins.load("meshrl.trainer.algorithms.losses", name, "compute")
        ragged = ragged_of(case)
        config = actor_config(case)
        mode = case.kwargs.get("loss_agg_mode") or DEFAULT_MODES.get(name, "token-mean")
        counts = case.config().get("global_batch_info") or {}
        aggregate = aggregator(mode, counts, case.inputs["response_mask"].shape[-1], ragged)
        inputs = _inputs(
            case, ragged, "rollout_log_prob" if name == "reinforce" else "old_log_prob"
        )
        return _found(case, inputs, compute(inputs, config, aggregate))

    return adapter


def _bypass(case: Case) -> Found:
    """Give 0 in cases where verl divides by 0, because every weight is 0 or every token rejected."""
    found = _by_name("bypass_mode")(case)
    refuse_no_weight(found.metrics, "rollout_corr/rollout_is_eff_sample_size")
    counts = case.config().get("global_batch_info") or {}
    mode = case.kwargs.get("loss_agg_mode", "token-mean")
    wanted = {"token-mean": "batch_num_tokens", "token-sum": "dp_size"}
    counted = counts.get(wanted.get(mode, "global_batch_size")) or mode == "token-sum"
    if found.metrics.get("rollout_corr/rollout_rs_masked_fraction") == 1 and not counted:
        return Found(
            outputs={**found.outputs, "loss": torch.tensor(torch.nan)}, metrics=found.metrics
        )
    return found


def _without_config(case: Case) -> Found:
    """The clipped loss with its settings as arguments."""
    ragged, k = ragged_of(case), case.kwargs
    settings = {
        **ACTOR_DEFAULTS,
        "clip_ratio": k["cliprange"],
        "clip_ratio_low": k.get("cliprange_low"),
        "clip_ratio_high": k.get("cliprange_high"),
        "clip_ratio_c": k.get("clip_ratio_c", 3.0),
    }
    config = actor_config(case).model_copy(update=settings)
    width = case.inputs["response_mask"].shape[-1]
    aggregate = aggregator(k.get("loss_agg_mode", "token-mean"), {}, width, ragged)
    inputs = _inputs(case, ragged, "old_log_prob")
    found = _found(case, inputs, vanilla.compute(inputs, config, aggregate))
    named = {name.removeprefix("actor/"): torch.tensor(v) for name, v in found.metrics.items()}
    return Found(
        outputs={"pg_loss": found.outputs["loss"], **found.outputs, **named},
        metrics={**found.metrics, **{name: float(v) for name, v in named.items()}},
    )


def _value_loss(case: Case) -> Found:
    ragged, k = ragged_of(case), case.kwargs
    width = case.inputs["response_mask"].shape[-1]
    values = flat(case, "vpreds").requires_grad_()
    output = value_loss(
        ragged,
        values,
        flat(case, "values"),
        flat(case, "returns"),
        cliprange_value=k["cliprange_value"],
        aggregate=aggregator(k.get("loss_agg_mode", "token-mean"), k, width, ragged),
    )
    (gradient,) = torch.autograd.grad(output.loss, values)
    return Found(
        outputs={
            "vf_loss": output.loss,
            "vf_clipfrac": output.metrics["critic/vf_clipfrac"],
            "grad_vpreds": padded(gradient, case),
        }
    )


def _aggregation(case: Case) -> Found:
    ragged = ragged_of(case, mask="loss_mask")
    width = case.inputs["loss_mask"].shape[-1]
    aggregate = aggregator(case.kwargs["loss_agg_mode"], case.kwargs, width, ragged)
    return Found(outputs={"loss": aggregate(flat(case, "loss_mat"), ragged)})


def _entropy_loss(case: Case) -> Found:
    ragged = ragged_of(case)
    width = case.inputs["response_mask"].shape[-1]
    mode = case.kwargs.get("loss_agg_mode", "token-mean")
    entropy = token_entropy(case.tensor("logits")).reshape(-1)
    return Found(outputs={"loss": aggregator(mode, {}, width, ragged)(entropy, ragged)})


ADAPTERS: Mapping[str, Callable[[Case], Found]] = {
    **{f"{CORE}compute_policy_loss_{name}": _by_name(name) for name in LOSSES},
    CORE + "compute_policy_loss_bypass_mode": _bypass,
    CORE + "compute_policy_loss": _without_config,
    CORE + "compute_value_loss": _value_loss,
    CORE + "agg_loss": _aggregation,
    CORE + "compute_entropy_loss": _entropy_loss,
}

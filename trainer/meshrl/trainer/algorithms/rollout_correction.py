"""Corrections for training on tokens that another policy sampled: importance weights and rejection.

Three policies (decoupled PPO, Hilton et al. 2021, https://arxiv.org/abs/2110.00641): π_rollout sampled, π_old is the
trainer's before the step, π_θ is being trained. The loss clips π_θ/π_old; this file corrects π_old/π_rollout:

    x = log π_old - log π_rollout
    token     w_t = exp(clamp(x_t, ±20))
    sequence  w   = exp(clamp(Σ_t x_t, ±20))      at every token of the row, not normalised by length

A threshold "2.0" clamps from above: truncated importance sampling (TIS; Ionides 2008; Yao et al. 2025,
https://fengyao.notion.site/off-policy-rl). A threshold "lo_hi" zeroes what is outside (IcePop; Ling Team 2025,
https://arxiv.org/abs/2510.18855); the mask stays. Rejection changes the mask. Three estimators of the divergence
(http://joschu.net/blog/kl-approx.html) of x clamped to ±20 make eleven statistics:

    k1 = -x        k2 = x²/2        k3 = exp(x) - 1 - x
    token_k1/2/3      drops the token
    seq_sum_k1/2/3    drops the row by the sum over its tokens
    seq_mean_k1/2/3   … by the mean (seq_mean_k1 is the geometric mean of the ratios)
    seq_max_k2/3      … by the maximum

k2 and k3 keep what is at most the threshold. A k1 threshold "lo_hi" bounds the ratio and keeps log lo ≤ k1 ≤ log hi;
one number h means (1/h, h). **k1 is -x, so the bounds hold for π_rollout/π_train**, the inverse of the importance
ratio: "0.5_1.2" keeps π_train/π_rollout within [1/1.2, 2]. Several statistics, comma separated, must all be passed.
The mask of M2PO is in losses/m2po.

In bypass mode π_old is π_rollout and x = log π_θ - log π_rollout: see losses/bypass_mode. A recipe is checked with
these thresholds: torch is imported when something is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.losses.m2po import second_moment_mask
from meshrl.trainer.algorithms.ragged import LOG_RATIO_BOUND, Ragged

if TYPE_CHECKING:
    from meshrl.trainer.config import RolloutCorrectionConfig

SMALLEST_MEAN = 1e-8
"""Weights whose mean is not above this are not normalised."""


STATISTICS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """One statistic and the interval that it must lie in."""

    name: str
    lower: float | None
    """log lo of a k1 statistic; None elsewhere."""
    upper: float
    """log hi of a k1 statistic, the threshold elsewhere."""

    @property
    def per_token(self) -> bool:
        """Whether it drops tokens instead of rows."""
        return self.name.startswith("token")

    def keeps(self, statistic: Tensor) -> Tensor:
        """Bool of the statistic's shape."""
        keep = statistic <= self.upper
        return keep if self.lower is None else keep & (statistic >= self.lower)


def parse(rollout_rs: str, threshold: float | str | None) -> tuple[Criterion, ...]:
    """`algorithm.rollout_correction.rollout_rs` and its threshold: one shared, or one per statistic.

    Raises:
        ConfigError: an unknown statistic, a missing, malformed or surplus threshold.
    """
    names = tuple(dict.fromkeys(part.strip() for part in rollout_rs.split(",") if part.strip()))
    unknown = [name for name in names if name not in STATISTICS]
    if unknown or not names:
        raise ConfigError(
            f"rollout_rs {rollout_rs!r}: {unknown[0] if unknown else 'nothing'} is not a statistic "
            f"(known: {', '.join(STATISTICS)})"
        )
    if threshold is None:
        raise ConfigError(f"rollout_rs {rollout_rs!r} needs rollout_rs_threshold")
    texts = [part.strip() for part in str(threshold).split(",") if part.strip()]
    if len(texts) == 1:
        texts *= len(names)
    if len(texts) != len(names):
        raise ConfigError(
            f"rollout_rs_threshold {threshold!r} has {len(texts)} values for {len(names)} "
            f"statistics ({', '.join(names)}); give one, or one each"
        )
    return tuple(_criterion(name, text) for name, text in zip(names, texts, strict=True))


def _criterion(name: str, text: str) -> Criterion:
    setting = f"rollout_rs_threshold {text!r} for {name}"
    low, high = _bounds(text, setting)
    if not name.endswith("k1"):
        if low is not None:
            raise ConfigError(f"{setting}: wanted one upper bound")
        return Criterion(name=name, lower=None, upper=high)
    upper = math.log(high)
    lower = -upper if low is None else math.log(low)
    if lower > upper:
        raise ConfigError(f"{setting}: 1/{text} is above {text}")
    return Criterion(name=name, lower=lower, upper=upper)


def parse_threshold(threshold: float | str) -> tuple[float | None, float]:
    """(lower, upper) of `rollout_is_threshold`; without a lower bound it means TIS, with one IcePop.

    Raises:
        ConfigError: not a positive number or "lo_hi" with lo <= hi.
    """
    return _bounds(str(threshold), f"rollout_is_threshold {threshold!r}")


def _bounds(text: str, setting: str) -> tuple[float | None, float]:
    """Lower and upper bound of "lo_hi", or of "hi" alone. Raises ConfigError, which names the `setting`."""
    low_text, bar, high_text = text.strip().rpartition("_")
    try:
        high = float(high_text)
        low = float(low_text) if bar else None
    except ValueError as error:
        raise ConfigError(f'{setting}: wanted a number or "lo_hi"') from error
    if not high > 0 or (low is not None and not 0 < low <= high):
        raise ConfigError(f"{setting}: wanted 0 < lo <= hi")
    return low, high


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Result of `correct`."""

    weights: Tensor | None
    """float32[N], detached, 0 at masked tokens; None when `rollout_is` is off."""
    mask: Tensor
    """bool[N]: trained tokens that no criterion rejects."""
    metrics: dict[str, float]
    """Prefix `rollout_corr/`."""


def correct(
    ragged: Ragged,
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    config: RolloutCorrectionConfig,
) -> Correction:
    """Weights and mask for one batch; log-probs float32[N].

    Weights are computed on the rows as given: rejection does not change them.

    Raises:
        ConfigError: a threshold that does not fit.
    """
    if not bool(ragged.mask.any()):
        weights = None if config.rollout_is is None else torch.zeros_like(train_logprobs)
        return Correction(weights=weights, mask=ragged.mask, metrics={})
    x = (train_logprobs - rollout_logprobs).detach()
    weights, mask = None, ragged.mask
    metrics: dict[str, float] = {}
    if config.rollout_is is not None:
        weights, metrics = importance_weights(
            ragged,
            x,
            level=config.rollout_is,
            threshold=config.rollout_is_threshold,
            batch_normalize=config.rollout_is_batch_normalize,
        )
    if config.rollout_rs is not None:
        criteria = parse(config.rollout_rs, config.rollout_rs_threshold)
        mask, rejected = reject(ragged, x, criteria)
        metrics |= rejected
    if config.second_moment_threshold is not None:
        keep = second_moment_mask(ragged.with_mask(mask), x, config.second_moment_threshold)
        metrics["second_moment_masked_fraction"] = float((mask & ~keep).sum() / ragged.num_valid)
        mask = keep
    metrics |= mismatch_metrics(ragged, train_logprobs, rollout_logprobs)
    prefixed = {f"rollout_corr/{name}": value for name, value in metrics.items()}
    return Correction(weights=weights, mask=mask, metrics=prefixed)


def bounded_weights(
    ragged: Ragged,
    log_ratio: Tensor,
    *,
    level: Literal["token", "sequence"],
    threshold: float | str,
) -> tuple[Tensor, Tensor]:
    """Weights [N] from x [N], detached, 0 at masked tokens: bounded by `threshold`, and before that."""
    lower, upper = parse_threshold(threshold)
    x = log_ratio if level == "token" else ragged.row_sum(log_ratio)[ragged.rows]
    raw = x.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() * ragged.mask
    inside = raw <= upper if lower is None else (raw >= lower) & (raw <= upper)
    return torch.where(inside, raw, upper if lower is None else 0.0), raw


def importance_weights(
    ragged: Ragged,
    log_ratio: Tensor,
    *,
    level: Literal["token", "sequence"],
    threshold: float | str = 2.0,
    batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """`bounded_weights` of a batch with trained tokens, and metrics without a prefix.

    `batch_normalize` divides by the mean over trained tokens (token) or over non-empty rows (sequence).
    """
    lower, upper = parse_threshold(threshold)
    weights, raw = bounded_weights(ragged, log_ratio, level=level, threshold=threshold)
    metrics = _weight_metrics(ragged, weights, raw, lower, upper)
    if level == "sequence":
        row_x = ragged.row_sum(log_ratio)
        log_low = -math.log(upper) if lower is None else math.log(lower)
        metrics |= {
            "rollout_is_max": float(row_x.max().clamp(max=LOG_RATIO_BOUND).exp()),
            "rollout_is_min": float(row_x.min().exp()),
            "rollout_is_ratio_fraction_high": float((row_x > math.log(upper)).float().mean()),
            "rollout_is_ratio_fraction_low": float((row_x < log_low).float().mean()),
        }
    if lower is not None:
        outside = (raw < lower) | (raw > upper)
        metrics["rollout_is_oob_ratio"] = float(ragged.token_mean(outside.float()))
    if batch_normalize:
        mean = ragged.token_mean(weights)
        if level == "sequence":
            mean = ragged.row_mean(weights)[ragged.nonempty].mean()
        factor = float(mean) if float(mean) > SMALLEST_MEAN else 1.0
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def effective_sample_size(ragged: Ragged, weights: Tensor) -> float:
    """Share of the tokens that the weights [N] leave in effect: (E w)² / E w², 0 when all are 0."""
    normalised = weights / (ragged.token_mean(weights) + 1e-8)
    second = float(ragged.token_mean(normalised.square()))
    return 1 / second if second > 0 else 0.0


def _weight_metrics(
    ragged: Ragged, weights: Tensor, raw: Tensor, lower: float | None, upper: float
) -> dict[str, float]:
    lower = 1 / upper if lower is None else lower
    mask = ragged.mask
    bounded = weights.clamp(0.0, upper)
    variance = ragged.token_mean(bounded.square()) - ragged.token_mean(bounded).square()
    several = int(ragged.num_valid) > 1
    row_weights, row_raw = ragged.row_mean(weights), ragged.row_mean(raw)
    metrics = {
        "mean": ragged.token_mean(weights),
        "max": weights[mask].max(),
        "min": weights[mask].min(),
        "ratio_fraction_high": ragged.token_mean((raw > upper).float()),
        "ratio_fraction_low": ragged.token_mean((raw < lower).float()),
        "std": variance.clamp(min=0).sqrt() if several else torch.zeros(()),
        "seq_mean": row_weights.mean(),
        "seq_std": row_weights.std() if ragged.num_rows > 1 else torch.zeros(()),
        "seq_max": row_weights.max(),
        "seq_min": row_weights.min(),
        "seq_max_deviation": (row_weights - 1).abs().max(),
        "seq_fraction_high": (row_raw > upper).float().mean(),
        "seq_fraction_low": (row_raw < lower).float().mean(),
    }
    named = {f"rollout_is_{name}": float(value) for name, value in metrics.items()}
    named["rollout_is_eff_sample_size"] = effective_sample_size(ragged, bounded)
    return named


def interpolate(rollout_logprobs: Tensor, logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Log π_prox float32[N], detached: the proximal policy of decoupled PPO without a forward pass.

    Recomputing π_prox costs one forward pass of the batch; the log-linear interpolation between the sampling policy
    and the trained one (A-3PO, Li et al. 2025, https://arxiv.org/abs/2512.06547) costs none:

        log π_prox = α log π_rollout + (1 - α) log π_θ,     α = 1/d,  d = versions between the two

    d = 0 or 1 keeps the sampling policy (d = 1 is one-step-off); the staler a token, the closer π_prox is to π_θ.
    `staleness` int64[N] is d of each token.
    """
    alpha = 1 / staleness.clamp(min=1)
    return alpha * rollout_logprobs + (1 - alpha) * logprobs.detach()


def statistic(name: str, ragged: Ragged, log_ratio: Tensor) -> Tensor:
    """The statistic `name` of x [N]: [N] for a token statistic, [B] for a row's (0 for empty rows)."""
    level, _, estimator = name.rpartition("_")
    x = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    k = {"k1": -x, "k2": x.square() / 2, "k3": x.exp() - 1 - x}[estimator]
    match level:
        case "token":
            return k
        case "seq_sum":
            return ragged.row_sum(k)
        case "seq_mean":
            return ragged.row_mean(k)
        case _:
            return ragged.row_max(k)


def reject(
    ragged: Ragged, log_ratio: Tensor, criteria: tuple[Criterion, ...]
) -> tuple[Tensor, dict[str, float]]:
    """The mask bool[N] of what every criterion keeps, and metrics without a prefix."""
    keep = torch.ones_like(ragged.mask)
    metrics: dict[str, float] = {}
    for criterion in criteria:
        values = statistic(criterion.name, ragged, log_ratio)
        tokens = values if criterion.per_token else values[ragged.rows]
        keeps = criterion.keeps(tokens)
        keep = keep & keeps
        prefix = f"rollout_rs_{criterion.name}"
        metrics |= _rejection_metrics(prefix, criterion, ragged, values, tokens)
        metrics[f"{prefix}_masked_fraction"] = float(ragged.token_mean((~keeps).float()))
        metrics[f"{prefix}_seq_masked_fraction"] = _share(ragged, _touched(ragged, ~keeps))
    metrics["rollout_rs_masked_fraction"] = float(ragged.token_mean((~keep).float()))
    metrics["rollout_rs_seq_masked_fraction"] = float(_touched(ragged, ~keep).float().mean())
    return ragged.mask & keep, metrics


def _touched(ragged: Ragged, dropped: Tensor) -> Tensor:
    """bool[B]: rows that lose a trained token."""
    return ragged.row_sum(dropped.long()) > 0


def _share(ragged: Ragged, rows: Tensor) -> float:
    """The share of `rows` bool[B] among rows with a trained token."""
    return float(rows[ragged.nonempty].float().mean()) if bool(ragged.nonempty.any()) else 0.0


def _rejection_metrics(
    prefix: str, criterion: Criterion, ragged: Ragged, values: Tensor, tokens: Tensor
) -> dict[str, float]:
    lower = 0.0 if criterion.lower is None else criterion.lower
    row_values = ragged.row_mean(values) if criterion.per_token else values
    row_values = row_values[ragged.nonempty]
    own = tokens[ragged.mask] if criterion.per_token else row_values
    clamped = tokens.clamp(lower, criterion.upper)
    variance = ragged.token_mean(clamped.square()) - ragged.token_mean(clamped).square()
    several = int(ragged.num_valid) > 1
    metrics = {
        "mean": ragged.token_mean(tokens),
        "max": own.max(),
        "min": own.min(),
        "fraction_high": (own > criterion.upper).float().mean(),
        "fraction_low": _below(own, criterion),
        "std": variance.clamp(min=0).sqrt() if several else torch.zeros(()),
        "seq_mean": row_values.mean(),
        "seq_std": row_values.std() if len(row_values) > 1 else torch.zeros(()),
        "seq_max": row_values.max(),
        "seq_min": row_values.min(),
        "seq_max_deviation": row_values.abs().max(),
        "seq_fraction_high": (row_values > criterion.upper).float().mean(),
    }
    if criterion.lower is not None:
        metrics["seq_fraction_low"] = _below(row_values, criterion)
    return {f"{prefix}_{name}": float(value) for name, value in metrics.items()}


def _below(values: Tensor, criterion: Criterion) -> Tensor:
    if criterion.lower is None:
        return torch.zeros(())
    return (values < criterion.lower).float().mean()


def mismatch_metrics(
    ragged: Ragged, train_logprobs: Tensor, rollout_logprobs: Tensor
) -> dict[str, float]:
    """Metrics without a prefix; all inputs float32[N]; nothing when no token is trained.

    kl, k3_kl              KL(π_rollout || π_train) per token, estimators k1 and k3, nats
    training_ppl, rollout_ppl, ppl_ratio, *log_ppl*     perplexities, mean over rows
    chi2_token, chi2_seq   E[ρ²] - 1 with ρ = π_train/π_rollout of a token, of a row
    """
    if not bool(ragged.mask.any()):
        return {}
    x = train_logprobs - rollout_logprobs
    rho_token = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    log_rho_row = ragged.row_sum(x).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    train, rollout = ragged.row_mean(train_logprobs), ragged.row_mean(rollout_logprobs)
    log_ppl_diff = rollout - train
    metrics = {
        "training_ppl": (-train).exp().mean(),
        "training_log_ppl": (-train).mean(),
        "kl": ragged.token_mean(-x),
        "k3_kl": ragged.token_mean(x.exp() - x - 1),
        "rollout_ppl": (-rollout).exp().mean(),
        "rollout_log_ppl": (-rollout).mean(),
        "log_ppl_diff": log_ppl_diff.mean(),
        "log_ppl_abs_diff": log_ppl_diff.abs().mean(),
        "log_ppl_diff_max": log_ppl_diff.max(),
        "log_ppl_diff_min": log_ppl_diff.min(),
        "ppl_ratio": log_ppl_diff.exp().mean(),
        "chi2_token": ragged.token_mean(rho_token.square()) - 1,
        "chi2_seq": (2 * log_rho_row).exp().mean() - 1,
    }
    return {name: float(value) for name, value in metrics.items()}


def mismatch_by(
    ragged: Ragged, train_logprobs: Tensor, rollout_logprobs: Tensor, labels: Tensor
) -> dict[int, dict[str, float]]:
    """`mismatch_metrics` of the tokens with each label int64[N], for example their policy step."""
    return {
        int(label): mismatch_metrics(
            ragged.with_mask(ragged.mask & (labels == label)), train_logprobs, rollout_logprobs
        )
        for label in torch.unique(labels[ragged.mask])
    }

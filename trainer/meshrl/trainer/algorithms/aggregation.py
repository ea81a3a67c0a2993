"""From one loss per token to the scalar that is differentiated, the same for every way to split a batch.

A mini-batch is trained in micro-batches on `dp_size` ranks whose gradients are averaged. The loss of
a mini-batch is the SUM of its micro-batch losses, so every denominator counts the whole mini-batch over
all ranks, and the factor `dp_size` undoes the averaging. Pass the counts (`batch_num_tokens`,
`global_batch_size`) and the result depends neither on the split nor on the world size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.ragged import MEAN_EPSILON, Ragged

if TYPE_CHECKING:
    from meshrl.trainer.config import ActorConfig, AggregationMode


@dataclass(frozen=True, kw_only=True, slots=True)
class Aggregator:
    """Call it with a loss per token float32[N] and its layout; it returns a scalar.

        token-mean               Σ_i Σ_t x m / tokens
        token-sum                Σ_i Σ_t x m
        seq-mean-token-sum       Σ_i (Σ_t x m) / rows
        seq-mean-token-sum-norm  Σ_i (Σ_t x m) / rows / loss_scale_factor      (Dr. GRPO)
        seq-mean-token-mean      Σ_i (Σ_t x m / L_i) / rows                    (GRPO, GSPO)

    each times `dp_size`; a row without trained tokens contributes 0.
    """

    mode: AggregationMode = "token-mean"
    batch_num_tokens: int | float | None = None
    """Trained tokens of the mini-batch over all ranks; None: of the rows at hand."""
    global_batch_size: int | float | None = None
    """Rows of the mini-batch over all ranks; None: the rows at hand that have a trained token."""
    loss_scale_factor: float | None = None
    """The divisor of `seq-mean-token-sum-norm`, a constant such as the longest allowed response."""
    dp_size: int = 1
    """Ranks over which gradients are averaged."""

    def __post_init__(self) -> None:
        """Refuse combinations whose result would depend on the split.

        Raises:
            ConfigError: a norm mode without divisor, or several ranks without the global counts.
        """
        if self.mode == "seq-mean-token-sum-norm" and self.loss_scale_factor is None:
            raise ConfigError(
                "actor.loss_agg_mode seq-mean-token-sum-norm needs actor.loss_scale_factor, "
                "a constant such as data.max_response_length"
            )
        if self.dp_size > 1 and self.mode == "token-mean" and self.batch_num_tokens is None:
            raise ConfigError(f"token-mean over {self.dp_size} ranks needs batch_num_tokens")
        if self.dp_size > 1 and self.mode.startswith("seq") and self.global_batch_size is None:
            raise ConfigError(f"{self.mode} over {self.dp_size} ranks needs global_batch_size")

    @classmethod
    def for_batch(
        cls,
        config: ActorConfig,
        *,
        batch_num_tokens: int,
        global_batch_size: int,
        max_response_length: int,
        dp_size: int = 1,
    ) -> Aggregator:
        """The aggregator of one mini-batch; `loss_scale_factor` defaults to the longest response."""
        return cls(
            mode=config.loss_agg_mode,
            batch_num_tokens=batch_num_tokens,
            global_batch_size=global_batch_size,
            loss_scale_factor=config.loss_scale_factor or float(max_response_length),
            dp_size=dp_size,
        )

    def __call__(self, loss: Tensor, ragged: Ragged) -> Tensor:
        """Aggregate `loss` [N]."""
        if self.mode == "token-mean":
            tokens = self.batch_num_tokens
            count = ragged.num_valid.clamp(min=1) if tokens is None else tokens
            return ragged.token_sum(loss) / count * self.dp_size
        if self.mode == "token-sum":
            return ragged.token_sum(loss) * self.dp_size
        row_loss = ragged.row_sum(loss)
        if self.mode == "seq-mean-token-mean":
            row_loss = row_loss / (ragged.valid_lengths + MEAN_EPSILON)
        total = self.over_rows(row_loss, ragged)
        if self.mode == "seq-mean-token-sum-norm" and self.loss_scale_factor is not None:
            total = total / self.loss_scale_factor
        return total

    def over_rows(self, row_loss: Tensor, ragged: Ragged) -> Tensor:
        """Aggregate one loss per row [B]: the mean over rows that have a trained token."""
        rows = self.global_batch_size
        count = ragged.nonempty.sum().clamp(min=1) if rows is None else rows
        counted = torch.where(ragged.nonempty, row_loss, row_loss.new_zeros(()))
        return counted.double().sum().to(row_loss.dtype) / count * self.dp_size

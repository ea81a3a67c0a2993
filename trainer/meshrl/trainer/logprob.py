"""Log-probabilities and entropies of given tokens, without ever holding the [N, V] logits whole.

With z = (h Wᵀ) / τ, log p = log_softmax(z), y the target:

    logprob = log p_y               ∂logprob/∂z = onehot(y) - p
    entropy = -Σ p log p            ∂entropy/∂z = -p (log p + entropy)

Forward keeps one float a token, the entropy; backward computes log p again, chunk by chunk. (Keeping the
normaliser instead would save a reduction and lose a digit: p = exp(z - lse) then no longer sums to 1.)
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 25
"""Logits held at once: 128 MiB in float32."""


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project and normalise in chunks of tokens.

    Args:
        hidden: [N, H], any floating type.
        weight: [V, H], the output embedding, same type.
        targets: int64[N].
        temperature: τ > 0, divides the logits.
        chunk_elements: How many logits may exist at once.

    Returns:
        logprobs float32[N] and entropies float32[N], both differentiable in `hidden` and `weight`.
    """
    chunk = max(1, chunk_elements // weight.shape[0])
    apply: Any = _LinearLogprob.apply  # torch leaves it untyped
    logprobs, entropies = apply(hidden, weight, targets, temperature, chunk)
    return logprobs, entropies


@torch.no_grad()
def linear_argmax(
    hidden: torch.Tensor, weight: torch.Tensor, *, chunk_elements: int = CHUNK_ELEMENTS
) -> torch.Tensor:
    """int64[N]: the most likely token after each of `hidden` [N, H], chunked like `linear_logprob`."""
    chunk = max(1, chunk_elements // weight.shape[0])
    best = [(part @ weight.T).argmax(-1) for part in torch.split(hidden, chunk)]
    return torch.cat(best) if best else hidden.new_empty(0, dtype=torch.int64)


@torch.no_grad()
def linear_sum_pi_squared(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> torch.Tensor:
    """float32[N]: Σ_v π(v)² after each of `hidden` [N, H], chunked like `linear_logprob`."""
    chunk = max(1, chunk_elements // weight.shape[0])
    parts = [
        (2 * _log_softmax(part, weight, temperature)).exp().sum(-1)
        for part in torch.split(hidden, chunk)
    ]
    return torch.cat(parts) if parts else hidden.new_empty(0, dtype=torch.float32)


class _LinearLogprob(torch.autograd.Function):
    """The pair of formulas above."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = hidden.shape[0]
        logprobs = hidden.new_empty(n, dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        for start in range(0, n, chunk):
            part = slice(start, start + chunk)
            log_p = _log_softmax(hidden[part], weight, temperature)
            logprobs[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropies[part] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, entropies = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks in float32: in bfloat16 a large vocabulary's small contributions would be lost.
        # None where the embedding is frozen (LoRA): a third of the work, and [V, H] floats, are saved.
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _log_softmax(hidden[part], weight, ctx.temperature)
            probs = log_p.exp()
            grad = torch.zeros_like(probs)
            if grad_entropy is not None:
                grad -= probs * (log_p + entropies[part, None]) * grad_entropy[part, None]
            if grad_logprob is not None:
                grad -= probs * grad_logprob[part, None]
                grad.scatter_add_(1, targets[part, None], grad_logprob[part, None])
            grad = (grad / ctx.temperature).to(weight.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32[n, V]: log p of every token."""
    return torch.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)

"""Log-probabilities and entropies of given tokens, without ever holding the [N, V] logits whole.

With z = (h Wᵀ) / τ, log p = log_softmax(z), y the target:

    logprob = log p_y               ∂logprob/∂z = onehot(y) - p
    entropy = -Σ p log p            ∂entropy/∂z = -p (log p + entropy)

Forward keeps one float a token, the entropy; backward computes log p again, chunk by chunk. (Keeping the
normaliser instead would save a reduction and lose a digit: p = exp(z - lse) then no longer sums to 1.)

On CUDA `statistics` and `gradient` are compiled, and nothing of a chunk's size is held in float32. Elsewhere, and
where that fails, operations one by one work in two float32 buffers. So they do on ranks that share the vocabulary
(`VocabularyShare`): these exchange maxima and sums of a chunk's rows, never logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from meshrl.common.device_lease import DeviceShare, logits_at_once

log = logging.getLogger(__name__)

COMPILED_ON = {"cuda"}
"""Kinds of device; none any more when something could not be compiled: no Triton, no C compiler."""
_WIDENS = hasattr(torch.ops.aten.addmm, "dtype_out")
"""Whether CUDA adds products of half precision to a float32 unrounded: from torch 2.8 on."""

CHUNK_ELEMENTS = {"cpu": 1 << 23}
"""Logits held at once, twice, by kind of device: 32 MiB each in float32, a CPU gains nothing from more. A GPU that is
not named here has as many as its memory allows, uncompiled: each chunk goes through the embedding's gradient once."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class VocabularyShare:
    """Which rows of the output embedding this rank has; those of the group have the others, and the same `hidden`."""

    group: dist.ProcessGroup
    first: int

    def own(self, targets: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int64[n] and bool[n]: rows of `targets` here, any for those elsewhere, and which are here."""
        index = targets - self.first
        return index.clamp(0, rows - 1), (index >= 0) & (index < rows)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over the ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values


_How: TypeAlias = tuple[float, float | None, VocabularyShare | None]


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_elements: int | None = None,
    share: VocabularyShare | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project and normalise in chunks of tokens.

    Args:
        hidden: [N, H], any floating type.
        weight: [V, H], the output embedding, same type.
        targets: int64[N], or int64[N, m]: several tokens at each place.
        temperature: τ > 0, divides the logits.
        softcap: c of Gemma 2: logits become c tanh(logit / c), before τ.
        chunk_elements: How many logits may exist at once; None: as many as suit the device.
        share: Whose rows `weight` has, where ranks share the vocabulary.

    Returns:
        logprobs, float32 in the shape of `targets`, and entropies float32[N], both differentiable in `hidden` and
        `weight`.
    """
    chunk = _chunk(weight, chunk_elements)
    apply: Any = _LinearLogprob.apply  # torch leaves it untyped
    logprobs, entropies = apply(hidden, weight, targets, temperature, softcap, chunk, share)
    return logprobs, entropies


@torch.no_grad()
def linear_top(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_elements: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[N, k], float32[N, k]: the likeliest tokens after each of `hidden` [N, H] and their log-probs, in chunks.

    The likeliest comes first; k is `count`, or the vocabulary's size where that is less.
    """
    chunk, k = _chunk(weight, chunk_elements), min(count, weight.shape[0])
    parts = [
        _log_softmax(part, weight, temperature, softcap).topk(k)
        for part in torch.split(hidden, chunk)
        if len(part)
    ]
    if not parts:
        return hidden.new_empty((0, k), dtype=torch.int64), hidden.new_empty((0, k)).float()
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


@torch.no_grad()
def linear_argmax(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    chunk_elements: int | None = None,
    share: VocabularyShare | None = None,
) -> torch.Tensor:
    """int64[N]: the most likely token after each of `hidden` [N, H], chunked like `linear_logprob`."""
    chunk = _chunk(weight, chunk_elements)
    best = [(part @ weight.T).max(-1) for part in torch.split(hidden, chunk)]
    if not best:
        return hidden.new_empty(0, dtype=torch.int64)
    tokens = torch.cat([part.indices for part in best])
    if share is None:
        return tokens
    values = torch.cat([part.values for part in best])
    here = values == share.largest(values.clone())
    # Of equal logits the first token's, as argmax takes it: the smallest, negated for the maximum.
    return -share.largest(torch.where(here, -(tokens + share.first), torch.iinfo(torch.int64).min))


@torch.no_grad()
def linear_sum_pi_squared(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_elements: int | None = None,
    share: VocabularyShare | None = None,
) -> torch.Tensor:
    """float32[N]: Σ_v π(v)² after each of `hidden` [N, H], chunked like `linear_logprob`."""
    chunk = _chunk(weight, chunk_elements)
    buffers = _Buffers(hidden, weight, chunk, (temperature, softcap, share))
    squares = hidden.new_empty(len(hidden), dtype=torch.float32)
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        _, probs = buffers.softmax(buffers.logits(hidden[part]))
        squares[part] = probs.square_().sum(-1)
    return squares if share is None else share.add_up(squares)


def _chunk(weight: torch.Tensor, elements: int | None) -> int:
    """Tokens of a chunk."""
    if elements is None:
        kind = weight.device.type
        elements = CHUNK_ELEMENTS[kind] if kind in CHUNK_ELEMENTS else _by_memory(weight.device)
    return max(1, elements // weight.shape[0])


@cache
def _by_memory(device: torch.device) -> int:
    """All that this process may take, not what is free now: sums must not depend on what else runs."""
    share = DeviceShare.of()
    total: int = torch.cuda.get_device_properties(device).total_memory
    return logits_at_once(int(total * (1.0 if share is None else share.memory)))


class _LinearLogprob(torch.autograd.Function):
    """The pair of formulas above, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        softcap: float | None,
        chunk: int,
        share: VocabularyShare | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = hidden.shape[0]
        logprobs = hidden.new_empty(targets.shape, dtype=torch.float32)
        entropies = hidden.new_empty(n, dtype=torch.float32)
        here = None
        if share is not None:
            targets, here = share.own(targets, weight.shape[0])
        several, found = _columns(targets), _columns(logprobs)
        buffers = _Buffers(hidden, weight, chunk, (temperature, softcap, share))
        for start in range(0, n, chunk):
            part = slice(start, start + chunk)
            found[part], entropies[part] = buffers.statistics(hidden[part], several[part])
        if share is not None and here is not None:
            logprobs = share.add_up(torch.where(here, logprobs, 0.0))
            share.add_up(entropies)
        ctx.save_for_backward(hidden, weight, targets, entropies, here)
        ctx.chunk, ctx.share, ctx.how = chunk, share, (temperature, softcap, share)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, entropies, here = ctx.saved_tensors
        grad_targets, grad_entropies = None if grads[0] is None else _columns(grads[0]), grads[1]
        grad_logprob = None if grad_targets is None else grad_targets.sum(-1)
        if grad_targets is not None and here is not None:
            grad_targets = grad_targets * _columns(here)
        # Frozen by an adapter, the embedding needs none: a third of this pass, and a float32 of each of its numbers.
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Summed over chunks in float32: in bfloat16 a large vocabulary's small contributions would be lost.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        buffers = _Buffers(hidden, weight, ctx.chunk, ctx.how)
        given = _columns(targets), grad_targets, grad_logprob, grad_entropies, entropies
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            of_part: list[Any] = [None if values is None else values[part] for values in given]
            grad = buffers.gradient(hidden[part], *of_part)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None and weight.dtype == torch.float32:
                grad_weight.addmm_(grad.T, hidden[part])
            elif grad_weight is not None and weight.is_cuda and _WIDENS:
                into: dict[str, Any] = {"out_dtype": torch.float32, "out": grad_weight}
                torch.addmm(grad_weight, grad.T, hidden[part], **into)
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
            del grad  # or the next one would be made beside it
        if ctx.share is not None and grad_hidden is not None:
            ctx.share.add_up(grad_hidden)
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, of_weight, None, None, None, None, None


def _columns(values: torch.Tensor) -> torch.Tensor:
    """[N, m] of the same memory, with m = 1 for [N]."""
    return values[:, None] if values.dim() == 1 else values


class _Buffers:
    """Memory for one chunk, used again for the next: the logits and, uncompiled, the log-probs and probabilities."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, chunk: int, how: _How) -> None:
        self._weight = weight
        self._logits = weight.new_empty(min(chunk, hidden.shape[0]), weight.shape[0])
        self._log_p: torch.Tensor | None = None
        self._temperature, self._softcap, self._share = how

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] of `hidden` [n, H], n up to the chunk."""
        n = len(hidden)
        out = self._logits if n == len(self._logits) else self._logits[:n]
        return torch.mm(hidden, self._weight.T, out=out)

    def statistics(
        self, hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs float32[n, m] of `targets` int64[n, m] and entropies float32[n] at `hidden` [n, H]."""
        logits = self.logits(hidden)
        found: tuple[torch.Tensor, torch.Tensor] | None = self._fused(statistics, logits, targets)
        if found is None:
            log_p, probs = self.softmax(logits)
            found = log_p.gather(1, targets), -probs.mul_(log_p).sum(-1)
        return found

    def gradient(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        grad_targets: torch.Tensor | None,
        grad_logprob: torch.Tensor | None,
        grad_entropies: torch.Tensor | None,
        entropies: torch.Tensor,
    ) -> torch.Tensor:
        """[n, V] by the logits, as `gradient`; `grad_logprob` [n] sums the `grad_targets` of all ranks."""
        logits = self.logits(hidden)
        given = targets, grad_targets, grad_entropies, entropies
        found: torch.Tensor | None = self._fused(gradient, logits, *given)
        if found is not None:
            return found
        log_p, probs = self.softmax(logits)
        if grad_entropies is None:
            grad = probs.zero_() if grad_logprob is None else probs.mul_(-grad_logprob[:, None])
        else:
            grad = log_p.add_(entropies[:, None]).mul_(grad_entropies[:, None])
            if grad_logprob is not None:
                grad.add_(grad_logprob[:, None])
            grad.mul_(probs).neg_()
        if grad_targets is not None:
            grad.scatter_add_(1, targets, grad_targets)
        _divided(grad, self._temperature)
        if self._tanh is not None:
            grad.mul_(self._tanh[: len(grad)].square_().neg_().add_(1.0))
        return grad.to(logits.dtype)

    def softmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[n, V] log p and p of what `logits` returned; the caller may overwrite both."""
        if self._log_p is None:
            single, like = self._logits.dtype == torch.float32, self._logits
            self._log_p = like if single else torch.empty_like(like, dtype=torch.float32)
            self._probs = torch.empty_like(self._log_p)
            self._tanh = None if self._softcap is None else torch.empty_like(self._log_p)
        n = len(logits)
        log_p, probs = self._log_p[:n], self._probs[:n]
        if log_p.dtype != logits.dtype:
            log_p.copy_(logits)
        if self._softcap is not None and self._tanh is not None:
            torch.tanh(log_p.div_(self._softcap), out=self._tanh[:n])
            torch.mul(self._tanh[:n], self._softcap, out=log_p)
        _divided(log_p, self._temperature)
        share, top = self._share, log_p.amax(-1, keepdim=True)
        log_p.sub_(top if share is None else share.largest(top))
        torch.exp(log_p, out=probs)
        total = probs.sum(-1, keepdim=True)
        if share is not None:
            share.add_up(total)
        return log_p.sub_(total.log()), probs.div_(total)

    def _fused(
        self, function: Callable[..., Any], logits: torch.Tensor, *given: torch.Tensor | None
    ) -> Any:
        """Result of `function`, compiled; None where compilation is not possible. A failure is logged once."""
        if self._share is not None or logits.device.type not in COMPILED_ON:
            return None
        # Views are compiled for again when the sizes of what they are cut from change, or how they are laid out.
        own = [x if x is None else x.clone(memory_format=torch.contiguous_format) for x in given]
        try:
            # Of any length, but of this vocabulary: with its size known, rows are known to be aligned.
            torch._dynamo.mark_static(logits, 1)
            return _compiled(function)(logits, *own, self._temperature, self._softcap)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            COMPILED_ON.clear()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("log-probs are computed slower: torch.compile failed: %s", reason)
            return None


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, dynamic=True)


def statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs float32[n, m] of `targets` int64[n, m], and entropies float32[n], under `logits` [n, V]."""
    scores, _ = _scores(logits, temperature, softcap)
    top = scores.amax(-1, keepdim=True)
    scores = scores - top
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    at_targets, _ = _scores(logits.gather(1, targets), temperature, softcap)
    entropies = total.log() - (weights * scores).sum(-1, keepdim=True) / total
    return at_targets - top - total.log(), entropies[:, 0]


def gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    grad_targets: torch.Tensor | None,
    grad_entropies: torch.Tensor | None,
    entropies: torch.Tensor,
    temperature: float,
    softcap: float | None,
) -> torch.Tensor:
    """[n, V] in the type of `logits`, of what `statistics` returns: `grad_targets` [n, m], `grad_entropies` [n]."""
    if grad_targets is None:
        grad_targets = torch.zeros_like(targets, dtype=torch.float32)
    scores, _ = _scores(logits, temperature, softcap)
    top = scores.amax(-1, keepdim=True)
    total = (scores - top).exp().sum(-1, keepdim=True)

    def by(part: torch.Tensor, more: torch.Tensor | float) -> torch.Tensor:
        """Gradient by `part` of each row's logits; `more` goes to these scores directly, not by the normaliser."""
        scores, slope = _scores(part, temperature, softcap)
        factor = grad_targets.sum(-1, keepdim=True)
        if grad_entropies is not None:
            log_p = scores - top - total.log()
            factor = factor + grad_entropies[:, None] * (log_p + entropies[:, None])
        found = more - (scores - top).exp() / total * factor
        return (found * slope / temperature).to(logits.dtype)

    # A target's own is put in whole: added to what is rounded already, 1 - p of a sure token would be lost.
    same = targets[:, :, None] == targets[:, None, :]  # a row may have a token twice
    own = torch.where(same, grad_targets[:, None, :], 0.0).sum(-1)
    return by(logits, 0.0).scatter(1, targets, by(logits.gather(1, targets), own))


def _scores(
    logits: torch.Tensor, temperature: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """float32: what softmax is taken of, and its slope by the logits, times τ."""
    if softcap is None:
        return logits.float() / temperature, 1.0
    tanh = torch.tanh(logits.float() / softcap)
    return softcap * tanh / temperature, 1.0 - tanh.square()


def _divided(values: torch.Tensor, temperature: float) -> torch.Tensor:
    """`values` divided in place; dividing by 1 would cost a pass over them."""
    return values if temperature == 1.0 else values.div_(temperature)


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float, softcap: float | None
) -> torch.Tensor:
    """float32[n, V]: log p of every token."""
    logits = (hidden @ weight.T).float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return torch.log_softmax(logits / temperature, dim=-1)

"""Rollout routing replay (R3, https://arxiv.org/abs/2510.11370): tokens go to the experts that sampled them.

    rows' column `routed_experts` ──Routing.of──▶ Pack.experts [P, L, K] ──RoutingReplay──▶ the routers' top-k

A router computes its scores as ever, and its top-k is answered with the recorded experts and their live scores: what
is chosen is the sampler's; what it weighs, and every gradient of the router, is the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.routed_experts import BYTE_EXPERTS
from meshrl.contract.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What recorded experts must look like for a model."""

    layers: int
    experts: int
    chosen: int
    """Experts of a token."""

    def of(self, row: Trajectory) -> npt.NDArray[Any]:
        """[T, layers, chosen] of a row, uint8 or, of more experts than that holds, int16; zeros where none are known.

        Raises:
            CorruptError: they are of another model.
        """
        dtype = np.uint8 if self.experts <= BYTE_EXPERTS else np.int16
        found = None if row.routed_experts is None else row.routed_experts.array()
        if found is None or not found.size:
            return np.zeros((len(row.tokens), self.layers, self.chosen), dtype)
        if found.shape[1:] != (self.layers, self.chosen) or found.max() >= self.experts:
            raise CorruptError(
                f"row {row.uid}: experts up to {found.max()}, {list(found.shape[1:])} a token; the policy has"
                f" {self.experts}, {[self.layers, self.chosen]} a token"
            )
        return found.astype(dtype, copy=False)


class RoutingReplay:
    """Tells the routers of a model where to send the tokens of the pack at hand."""

    def __init__(self, hf: Any, layers: Iterable[nn.Module]) -> None:
        """Change the routers of `hf`, whose decoder layers are `layers`.

        Raises:
            UserError: there are none, or of several kinds.
        """
        self.experts: torch.Tensor | None = None
        """[P, L, K] of the pack that is forwarded, and differentiated, next; None: routers choose."""
        kinds, layers = set(), list(layers)
        for index, layer in enumerate(layers):
            for router in _routers(layer):
                kind = router.weight.shape[0], router.top_k
                router.forward = self._told(router.forward, index, kind[0])
                kinds.add(kind)
        if len(kinds) != 1:
            has = "several kinds of routers" if kinds else "no router that we know"
            raise UserError(
                f"rollout.routing_replay: {type(hf).__name__} has {has}: its experts cannot be replayed"
            )
        experts, chosen = kinds.pop()
        self.routing = Routing(layers=len(layers), experts=experts, chosen=chosen)

    def _told(self, forward: Callable[..., Any], layer: int, experts: int) -> Callable[..., Any]:
        def told(*inputs: Any, **named: Any) -> Any:
            if self.experts is None:
                return forward(*inputs, **named)
            with _Chosen(self.experts[:, layer].long(), experts):
                return forward(*inputs, **named)

        return told


def _routers(layer: nn.Module) -> Iterator[Any]:
    """Those of a layer: transformers' are modules of their own, with `top_k` and a matrix [experts, hidden]."""
    for module in layer.modules():
        weight = getattr(module, "weight", None)
        matrix = isinstance(weight, torch.Tensor) and weight.ndim == 2
        if matrix and type(module).__name__.endswith("Router") and hasattr(module, "top_k"):
            yield module


class _Chosen(TorchFunctionMode):
    """Answers a router's top-k of all experts with the given ones."""

    def __init__(self, given: torch.Tensor, experts: int) -> None:
        """`given` is int64[P, K]; a token with one number everywhere keeps its own."""
        super().__init__()
        self._given, self._experts = given, experts

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk):
            return found
        scores, given = args[0], self._given
        # Other top-ks of a router are of groups of experts (DeepSeek-V3).
        if scores.shape != (len(given), self._experts) or found.indices.shape != given.shape:
            return found
        if given.shape[1] > 1:
            unknown = given[:, :1] == given[:, -1:]
            given = torch.where(unknown, found.indices, given)
        return torch.return_types.topk((scores.gather(-1, given), given))

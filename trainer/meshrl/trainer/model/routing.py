"""The routers of a mixture of experts: told where tokens go, and kept from sending all to a few.

Rollout routing replay (R3, https://arxiv.org/abs/2510.11370): tokens go to the experts that sampled them.

    rows' column `routed_experts` ──Routing.of──▶ Pack.experts [P, L, K] ──RoutingReplay──▶ the routers' top-k

A router computes its scores as ever, and its top-k is answered with the recorded experts and their live scores: what
is chosen is the sampler's; what it weighs, and every gradient of the router, is the trainer's.

Balance: an auxiliary loss, or a bias on the routers' choice.

    routers ──▶ logits, chosen experts ──▶ E Σ_e f_e P_e, added to the loss       (Switch, as transformers has it)
                                     └──▶ tokens of each expert ──▶ after the optimizer's step
                                          bias_e += rate · sign(mean - tokens_e)   (https://arxiv.org/abs/2408.15664)

f is the share of the tokens that choose an expert, P its mean probability, over all layers of a micro-batch; a
micro-batch counts by its rows' share of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.routed_experts import BYTE_EXPERTS
from meshrl.contract.types import Trajectory
from meshrl.trainer.config import ActorConfig
from meshrl.trainer.model.packing import Pack
from meshrl.trainer.ranks.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Sizes that recorded experts must have for a model."""

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
    """Routers of a layer: in transformers, modules with `top_k` and a matrix [experts, hidden]."""
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


BIAS = "e_score_correction_bias"
"""transformers' name, of DeepSeek-V3's routers and of those made like them."""


class ExpertBalance:
    """Reads what a model's routers choose while it is trained."""

    def __init__(self, hf: Any, actor: ActorConfig, world: World) -> None:
        """Hook into the routers.

        Raises:
            UserError: the model has none that transformers names, or none with a bias where one is to be moved.
        """
        self.coefficient = actor.router_aux_loss_coef
        self._rate = actor.moe_router_bias_update_rate
        self._world = world
        self._routers = routers(hf)
        if not self._routers:
            key = "router_aux_loss_coef" if self.coefficient else "moe_router_bias_update_rate"
            raise UserError(f"actor.{key}: {type(hf).__name__} has no router of experts; want 0")
        if self._rate and not all(hasattr(router, BIAS) for router in self._routers):
            raise UserError(
                f"actor.moe_router_bias_update_rate: the routers of {type(hf).__name__} have no {BIAS};"
                " want 0, or router_aux_loss_coef"
            )
        self._recording = False
        self._tokens = 0
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._counts: torch.Tensor | None = None
        for router in self._routers:
            router.register_forward_hook(self._see)

    @classmethod
    def of(cls, hf: Any, actor: ActorConfig, world: World) -> ExpertBalance | None:
        """None where nothing is asked for."""
        asked = actor.router_aux_loss_coef or actor.moe_router_bias_update_rate
        return cls(hf, actor, world) if asked else None

    def _see(self, _: nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        if self._recording:  # not when activations are computed again
            self._seen.append((output[0][: self._tokens], output[2][: self._tokens]))

    @contextmanager
    def recorded(self, pack: Pack) -> Iterator[None]:
        """While the model forwards the pack, its routers' choices are kept for `loss`."""
        share = pack.layout.share
        self._tokens = pack.input_ids.shape[1]
        if share is not None:  # the last shares end in padding
            left = share.tokens - share.among.rank * share.width
            self._tokens = min(max(left, 0), share.width)
        self._seen, self._recording = [], True
        try:
            yield
        finally:
            self._recording = False

    def loss(self) -> tuple[torch.Tensor, float]:
        """This rank's part of the auxiliary loss of the last micro-batch, which those of a sequence group add up to.

        Returns:
            The part, differentiable, and the sum of the parts.
        """
        probabilities = torch.stack([z.float().softmax(-1).sum(0) for z, _ in self._seen]).sum(0)
        experts, device = len(probabilities), probabilities.device
        counts = torch.stack([_tokens_of(chosen, experts) for _, chosen in self._seen])
        self._counts = counts if self._counts is None else self._counts + counts
        places = torch.full((1,), float(len(self._seen) * self._tokens), device=device)
        sums = torch.cat([counts.sum(0), probabilities.detach(), places])
        if (among := self._world.sequence) is not None:
            dist.all_reduce(sums, group=among.group)
        chosen, likely = sums[:experts], sums[experts:-1]
        scale = experts / sums[-1].clamp(min=1.0).square()
        return scale * (chosen * probabilities).sum(), float(scale * (chosen * likely).sum())

    def settle(self, *, stepped: bool) -> float:
        """After an optimizer step: move the biases; every rank calls this.

        Returns:
            How much more than the mean the busiest expert of a layer had, as a share of the mean, at the worst layer.
        """
        if self._counts is None:
            shape = len(self._routers), self._routers[0].weight.shape[0]
            self._counts = torch.zeros(shape)
        own = self._counts.double().cpu().numpy()
        # Ranks that forward the same tokens count them alike.
        total = np.sum(self._world.all_gather(own.reshape(-1)), axis=0).reshape(own.shape)
        self._counts = None
        mean = total.mean(axis=1, keepdims=True)
        if self._rate and stepped:
            for router, signs in zip(self._routers, np.sign(mean - total), strict=True):
                bias = getattr(router, BIAS)
                bias += self._rate * torch.from_numpy(signs).to(bias)
        return float((total.max(axis=1) / np.maximum(mean[:, 0], 1.0)).max() - 1.0)


def routers(hf: Any) -> list[Any]:
    """Modules whose output is (logits, weights, chosen experts), in layer order."""
    for module in hf.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if kind := getattr(recorded, "target_class", None):
            return [each for each in hf.modules() if isinstance(each, kind)]
    return []


def _tokens_of(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """float32[E]: how often each is among int64[n, k]."""
    ones = torch.ones(chosen.numel(), device=chosen.device)
    return torch.zeros(experts, device=chosen.device).index_add_(0, chosen.reshape(-1), ones)

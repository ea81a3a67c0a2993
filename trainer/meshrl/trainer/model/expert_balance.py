"""Keeps the experts of a mixture busy: by an auxiliary loss, or by a bias on the routers' choice.

    routers ──▶ logits, chosen experts ──▶ E Σ_e f_e P_e, added to the loss       (Switch, as transformers has it)
                                     └──▶ tokens of each expert ──▶ after the optimizer's step
                                          bias_e += rate · sign(mean - tokens_e)   (https://arxiv.org/abs/2408.15664)

f is the share of the tokens that choose an expert, P its mean probability, over all layers of a micro-batch; a
micro-batch counts by its rows' share of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from meshrl.contract.errors import UserError
from meshrl.trainer.config import ActorConfig
from meshrl.trainer.model.packing import Pack
from meshrl.trainer.ranks.world import World

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

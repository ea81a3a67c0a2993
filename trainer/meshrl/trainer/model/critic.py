"""The critic: the policy's architecture with one output, the value of what is written so far.

    pack ──▶ decoder (and what reads its pictures) ──▶ hidden[response positions] ──▶ linear [H, 1] ──▶ V float32[N]

V_t is read where token t is predicted, before the policy has chosen it. The head starts at 0: before its first
update the critic says 0 everywhere, so a run does not begin with noise as its baseline.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.packing import Pack
from meshrl.trainer.model.policy import HfModel, response_hidden, shard
from meshrl.trainer.model.vision import tower_of
from meshrl.trainer.ranks.world import World


class Critic(nn.Module):
    """Values of the response tokens of a pack."""

    def __init__(self, hf: HfModel) -> None:
        super().__init__()
        self.decoder = hf.get_decoder() if tower_of(hf) is None else hf.base_model
        self._hidden = partial(response_hidden, hf)  # of `hf`, nothing but the decoder is read
        self.value_head = nn.Linear(hf.get_output_embeddings().weight.shape[1], 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, pack: Pack) -> torch.Tensor:
        """Returns V float32[N] for the N response tokens."""
        values: torch.Tensor = self.value_head(self._hidden(pack))
        # A sum over one entry, because FSDP wants no view of what the module made.
        return pack.joined(values.sum(-1, dtype=torch.float32))


def build_critic(hf: HfModel, world: World, config: ModelConfig) -> Critic:
    """Shard the critic over the ranks as the policy is; `hf` is used up."""
    return shard(Critic(hf).train(), hf, world, config)

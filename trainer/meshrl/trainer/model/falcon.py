"""Falcon's attention over packs: its code does not ask transformers' attention interface."""

from __future__ import annotations

from typing import Any

import torch

from meshrl.contract.errors import UserError
from meshrl.trainer.model import attention


def take_falcon() -> None:
    """Have models of this kind that are asked for packed attention compute it."""
    from transformers.models.falcon import modeling_falcon

    own: Any = modeling_falcon  # half of it has no types

    class PackedFalconAttention(own.FalconAttention):  # type: ignore[misc]
        def forward(
            self,
            hidden_states: torch.Tensor,
            alibi: torch.Tensor | None,
            attention_mask: torch.Tensor | None,
            position_ids: torch.Tensor | None = None,
            position_embeddings: Any = None,
            **_: Any,
        ) -> tuple[torch.Tensor, None]:
            """[1, P, H] of [1, P, H], and no weights. Raises UserError for distances that a pack has not."""
            if alibi is not None:
                raise UserError("packed training does not support alibi")
            split = self._split_heads(self.query_key_value(hidden_states))
            query, key, value = (x.transpose(1, 2) for x in split)
            query, key = own.apply_rotary_pos_emb(query, key, *position_embeddings)
            found = attention.packed_attention(
                self, query, key, value, attention_mask, position_ids=position_ids
            )[0]
            return self.dense(found.flatten(2)), None

    own.FALCON_ATTENTION_CLASSES[attention.NAME] = PackedFalconAttention

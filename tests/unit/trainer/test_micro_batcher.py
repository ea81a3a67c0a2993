"""Packs are laid out one ahead of the device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshrl.trainer.learner.experience import MiniBatch
from meshrl.trainer.learner.micro_batcher import MicroBatcher
from meshrl.trainer.model.packing import Pack
from meshrl.trainer.ranks.world import World

from . import tiny


def test_the_next_pack_is_laid_out_while_the_device_computes_this_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        index: SimpleNamespace(tokens=tokens, prompt_length=2, ref_top_ids=None)
        for index, tokens in enumerate(tiny.rows(3))
    }
    mini = MiniBatch(rows=(0, 1, 2), ranks=(((0,), (1,), (2,)),))
    schedule = SimpleNamespace(mini_batches=(mini,))
    batcher = MicroBatcher(*cast(Any, (schedule, rows, world)))
    events: list[str] = []
    lay = MicroBatcher.pack

    def laid(self: MicroBatcher, chosen: Sequence[int]) -> Pack:
        events.append(f"pack {chosen[0]}")
        return lay(self, chosen)

    def forward(pack: Pack) -> tuple[torch.Tensor, ...]:
        events.append("forward")
        return (torch.zeros(len(pack.targets)),)

    monkeypatch.setattr(MicroBatcher, "pack", laid)
    for chosen, _ in batcher.micro_batches(mini, torch.nn.Identity(), forward):
        events.append(f"backward {chosen[0]}")
    ahead = ["pack 0", "forward", "pack 1", "backward 0", "forward", "pack 2", "backward 1"]
    assert events == [*ahead, "forward", "backward 2"]

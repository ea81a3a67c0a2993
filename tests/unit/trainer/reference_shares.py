"""A reference over several ranks beside one in one process: run as a program by test_reference."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import tiny
from torch.distributed.tensor import DTensor

from meshrl.trainer.distributed import World
from meshrl.trainer.reference import ReferenceModel


async def lead(model: ReferenceModel, alone: ReferenceModel) -> None:
    for count, top, temperature in ((9, 3, 0.7), (1, 0, 1.0), (2, 2, 1.0)):
        await asyncio.to_thread(model._ranks.idle)
        rows = tiny.rows(count)
        found = await model.judged(rows, temperature=temperature, top=top)
        wanted = await alone.judged(rows, temperature=temperature, top=top)
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.keys() == theirs.keys()
            for name, column in theirs.items():
                assert mine[name].dtype == column.dtype
                np.testing.assert_array_equal(mine[name], column)


def main(path: Path) -> None:
    world = World.start("cpu")
    for deterministic in (True, False):
        how = {"device": "cpu", "max_tokens": 60, "deterministic": deterministic}
        model = ReferenceModel(path, world=world, **how)
        policy = model._policy
        assert all(isinstance(each, DTensor) for each in policy.parameters())
        if world.is_main:
            alone = ReferenceModel(path, **how)
            asyncio.run(lead(model, alone))
            alone.close()
            model.close()
        else:
            model.follow()
        assert all(isinstance(each, DTensor) for each in policy.parameters())  # and none is whole
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

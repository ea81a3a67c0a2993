"""Two ranks that save twice and look for the newest checkpoint, the last one damaged: run as a program.

Each rank prints what it has hashed, in bytes, while it saved and while it loaded, and the step that it found.
"""

from __future__ import annotations

import sys
from pathlib import Path

import rank_work
import torch
import xxhash

from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.distributed import World

hashed = 0


class Counted:
    """xxh3-128 that counts what it is given."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, block: bytes) -> None:
        global hashed
        hashed += len(block)
        self._digest.update(block)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class Counting:
    """The module `xxhash`, as far as checkpoints use it."""

    xxh3_128 = Counted


def main(model: Path, root: Path) -> None:
    global hashed
    world = World.start("cpu")
    learner = rank_work.make(model, world)
    checkpoint.xxhash = Counting  # type: ignore[assignment, attr-defined]
    state = TrainerState(run="r", step=1, epoch=1, seed=0, world_size=2, kl_coef=0.0)
    parts = learner.policy, learner.optimizers
    path = checkpoint.save(root, *parts, state, world, keep=2)
    saving, hashed = hashed, 0
    checkpoint.load(checkpoint.newest(root, world)[0], *parts)  # type: ignore[index]
    loading = hashed
    later = TrainerState(run="r", step=2, epoch=1, seed=0, world_size=2, kl_coef=0.0)
    path = checkpoint.save(root, *parts, later, world, keep=2)
    if world.is_main:
        victim = path / "tensors" / "__1_0.distcp"
        victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    world.barrier()
    found = checkpoint.newest(root, world)
    assert found is not None
    print(f"{saving} {loading} {found[1].step}\n", end="", flush=True)
    world.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))

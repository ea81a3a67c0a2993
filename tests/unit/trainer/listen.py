"""Trainer ranks that print the addresses at which they listen: run as a program."""

from __future__ import annotations

import sys
from pathlib import Path

from meshrl.trainer.distributed import World

sys.path.insert(0, str(Path(__file__).parents[2]))
from listening import addresses

world = World.start("cpu")
world.barrier()
print(*sorted(addresses()), flush=True)
world.barrier()
world.close()

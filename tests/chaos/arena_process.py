"""An owner of shared memory for test_arena_kill.py: makes an arena, puts a frame, tells where, waits to be killed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np

from meshrl.contract.codec.arena import Arena
from meshrl.contract.frames import pack

arena = Arena.create(1 << 20, Path(sys.argv[1]))
slot = arena.put([pack([{"tokens": np.arange(1000, dtype=np.int32)}])])
assert slot is not None
print(arena.offer.boot_id, arena.offer.name, slot.offset, slot.size, slot.checksum, flush=True)
signal.pause()

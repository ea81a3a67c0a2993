"""Shared memory between real processes: read across, and swept when its owner is killed, not before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from meshrl.contract.codec.arena import FOLDER, Arena, Lent, Offer, Slot, sweep
from meshrl.contract.frames import Frame


def test_an_arena_is_read_by_others_and_goes_with_its_owner() -> None:
    script = str(Path(__file__).with_name("arena_process.py"))
    command = [sys.executable, script, str(FOLDER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        boot, name, *numbers = owner.stdout.readline().split()
        accepted = Lent.accept(Offer(boot, name))
        assert accepted is not None
        lent, _ = accepted
        frame = Frame(lent.take(Slot(*map(int, numbers))))
        assert frame.columns["tokens"].values.tolist() == list(range(1000))

        sweep()
        assert (FOLDER / name).exists(), "the arena of a living process was swept"
        owner.kill()
    Arena.create(1 << 16).close()  # whoever makes one sweeps
    assert not (FOLDER / name).exists()
    # A queue in the middle of reading still has the bytes.
    assert Frame(lent.take(Slot(*map(int, numbers)))).rows == 1
    lent.close()

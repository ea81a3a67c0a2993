"""A trainer process for test_dataset.py to kill: `python foreign_trainer.py ADDRESS FOLDER WORKERS DIE_AT`.

Its "model" is the list of what it learned, saved every second step. Dies by SIGKILL in the middle of step DIE_AT.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from torch.utils.data import DataLoader

from meshrl.client.dataset import QueueDataset


def main(address: str, folder: Path, workers: int, die_at: int) -> None:
    path = folder / "model.json"
    model = json.loads(path.read_text()) if path.exists() else {"step": 0, "learned": []}
    with QueueDataset(address, run="run", groups=2, step=model["step"]) as dataset:
        for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
            model["learned"].append([str(row.uid) for row in batch.rows])
            if batch.step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            dataset.settle(batch.step)
            if batch.step % 2:
                with dataset.checkpoint() as step:
                    model["step"] = step
                    (folder / "model.tmp").write_text(json.dumps(model))
                    (folder / "model.tmp").replace(path)
                    if step == die_at + 100:  # between the save and the commit
                        os.kill(os.getpid(), signal.SIGKILL)
        with dataset.checkpoint() as step:
            path.write_text(json.dumps({**model, "step": step}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

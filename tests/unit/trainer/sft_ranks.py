"""Fine-tuning as a configuration file says, by however many ranks: run as a program by test_sft_conversations."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from meshrl.trainer.offline import sft
from meshrl.trainer.offline.config import SftConfig

if __name__ == "__main__":
    torch.set_num_threads(1)
    sft.run(SftConfig.model_validate_json(Path(sys.argv[1]).read_text()))

"""Files named `.json` hold one JSON object per line, as those named `.jsonl` do."""

from __future__ import annotations

from meshrl.trainer.data.readers import jsonl

read = jsonl.read

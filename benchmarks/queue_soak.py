"""Measures whether the queue's memory stays flat at full rate, and while nobody takes rows.

    python benchmarks/queue_soak.py [--minutes 10] [--stopped-minutes 0.5] [--store disk]

The processes and rows of queue.py, without an end: producers, annotator and consumer at full rate, once the queue
has seen more tasks than it remembers; then the consumer stops, the producers fill what admission allows and wait.

The memory of the queue's process is read ten times a second; a reading is the most that was seen in a sixtieth of
the time. A part is flat if no reading deviates by more than 5 % from their median, and if a line through them rises
by no more than that. `heap` is anonymous memory; `rss` also counts the pages of the store's file. `thirds` separates
a queue that slows down from a machine that does: the queue's processor time per sample would grow. The consumer
compares rows with what was made; the ledger must balance. The last line is one JSON object.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent / "queue_bench")
os.environ.setdefault(
    "GRPC_VERBOSITY", "ERROR"
)  # says at every fork that it was not prepared for one

if __name__ == "__main__":
    from soak import main

    main(str(__doc__))

"""Is the queue's memory flat while rows rush through it, and while nobody takes them?

    python benchmarks/queue_soak.py [--minutes 10] [--stopped-minutes 0.5] [--store disk]

The processes and rows of queue.py, without an end: producers, annotator and consumer at full rate; then the consumer
stops, the producers fill what admission allows and wait. The queue's memory is read 60 times in each part; the first
fifth warms up, and the rest must stay within 5 % of its median. `heap` is anonymous memory, `rss` counts the pages of
the store's file as well, which the kernel takes back when it wants. The consumer compares rows with what was
made; the ledger must balance. The last line is one JSON object.
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

"""Does a large queue stay quick, small and easy to restart? At 1,000, 100,000 and 1,000,000 resident rows.

    python benchmarks/queue_scale.py [--rows 1000,100000,1000000] [--tokens 64]

A queue service with a disk store (fsync on), over gRPC on loopback; its clients are this process. Resident rows were
sampled, their payload stored, and wait for their annotation. A consumer waits for one group; then the oldest group's
annotation is written. `ready_to_taken` runs from the answer to that write to the consumer's holding the group (0 when
it had it before), `write_begun_to_taken` from before the write. Rows that leave are replaced. At the end the
queue process is killed with -9: `recovery_s` runs from starting a new one, interpreter included, to its ledger, which
must be the old one. Rows are short so that filling takes minutes at most. The last line is one JSON object.
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
    from scale import main

    main(str(__doc__))

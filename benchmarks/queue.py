"""End to end through the transfer queue and through TransferQueue 0.1.11: samples per second, CPU, latency, memory.

    make bench-queue, or python benchmarks/queue.py [--store memory,disk,redis] [--rounds 3] [--no-peer] [--floor] \
        [--tokens 512,8192,32768] [--experts]

The same work for both: 4,096 samples in groups of 8, prompts of about 256 tokens, responses lognormal with mean 512
and at most 4,096; int32 ids, fp32 log-probs, uint8 mask. The same processes: the queue's own, two producers, one
annotator that reads the tokens and adds reward and reference log-probs, one consumer of 256 samples at a time.
`--tokens` makes responses longer, one size after the other, and `--experts` adds the 384 bytes of a token's experts
(48 layers, 8 each): batches and calls have fewer samples then, so that a batch is 64 MiB and a call of ours 16.

Each round starts every system anew, ours and theirs in turn; a first small pass warms it up. The clock runs from the
first row offered to the last one consumed (ours: settled, published and committed as well). CPU is that of all
processes of a system, without Ray's daemons, which are listed alone ("framework"). `put` is a call that stores rows,
`take` the time from asking for 256 samples to holding them, waiting included. After the clock has stopped the
consumer's rows are compared with what was made, byte for byte: a lost, repeated or mixed-up row ends the benchmark.
The last line is one JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path[0] = str(HERE / "queue_bench")
    sys.path.append(str(HERE))
    from sizes import of_each

    of_each(str(__doc__))
elif __name__ == "queue":
    # A script of this folder, or a library that it imports, means the module of the standard library.
    import sysconfig
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("queue", Path(sysconfig.get_path("stdlib")) / "queue.py")
    assert spec is not None and spec.loader is not None
    sys.modules["queue"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["queue"])

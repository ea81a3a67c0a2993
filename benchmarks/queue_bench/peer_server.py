"""The peer's own side: a local Ray with TransferQueue's controller and storage units. Runs in the peer's environment.

    python peer_server.py CONFIG.pickle UNITS

Prints one line of JSON, {"server": [pids of its actors], "framework": [pids of Ray]}, and ends with stdin.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "TQ_LOGGING_LEVEL": "ERROR"}
os.environ |= {"RAY_gcs_server_port_wait_time_s": "300"}

import psutil
import ray
import ray._private.node
import transfer_queue as tq
from omegaconf import OmegaConf
from work import GROUP

ACTORS = ("TransferQueueController", "SimpleStorageUnit")


STARTS = 3
SLOWER = 10


class SlowClock:
    """`time` for Ray's node: it gives its daemon 30 s to start, which a busy machine may not have."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() / SLOWER


def start_ray() -> None:
    ray._private.node.time = SlowClock()
    for left in reversed(range(STARTS)):
        try:
            ray.init(
                num_cpus=16,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=100 << 20,
            )
            return
        except Exception:  # it has no type of its own for this
            ray.shutdown()
            if not left:
                raise


def main(config_path: Path, units: int) -> None:
    start_ray()
    # Polling mode: the other one sleeps five seconds in the controller's only request thread whenever rows are
    # short, and then ends that thread for all clients.
    wanted = {
        "controller": {
            "sampler": tq.GRPOGroupNSampler(n_samples_per_prompt=GROUP),
            "polling_mode": True,
        },
        "backend": {"SimpleStorage": {"num_data_storage_units": units}},
    }
    config = tq.init(OmegaConf.create(wanted, flags={"allow_objects": True}))
    config_path.write_bytes(pickle.dumps(config))
    # Ray's daemons are adopted by no one else: they are children of this process.
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    actors = [p.pid for p in processes if any(name in " ".join(p.cmdline()) for name in ACTORS)]
    others = [process.pid for process in processes if process.pid not in actors]
    print(json.dumps({"server": actors, "framework": others}), flush=True)
    sys.stdin.read()
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

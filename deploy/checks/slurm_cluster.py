"""A Slurm of three nodes on this machine, for tests: slurmctld and three slurmd, from Debian's packages.

Run it as root in a mount namespace of its own (`unshare --mount`): `n1`, `n2` and `n3` are then names of 127.0.0.2,
127.0.0.3 and 127.0.0.4, and nobody else's /etc/hosts changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

NODES = ("n1", "n2", "n3")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
# A requeued job waits for `cred_expire` seconds, 120 by default.
CONFIG = """\
ClusterName=mesh
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort={port}
MpiDefault=none
KillWait=60
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
NodeName=n[1-3] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing() -> str:
    """Why there can be no cluster here; empty where there can."""
    lacking = [name for name in PROGRAMS if not shutil.which(name)]
    if lacking:
        return (
            f"{', '.join(lacking)}: not installed (apt-get install slurmctld slurmd slurm-client)"
        )
    return "" if os.geteuid() == 0 else "slurmd needs root"


def main(folder: Path, port: int) -> None:
    """Start the daemons in `folder`, say `ready`, and wait for the end of the input."""
    (folder / "state").mkdir()
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(folder=folder, port=port, first=port + 1, last=port + len(NODES))
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    hosts = folder / "hosts"
    names = (f"127.0.0.{number} {name}\n" for number, name in enumerate(NODES, start=2))
    hosts.write_text(Path("/etc/hosts").read_text() + "".join(names))
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    running = [
        subprocess.Popen([*daemon, "-f", str(config)], stdin=subprocess.DEVNULL, stdout=sys.stderr)
        for daemon in daemons
    ]
    env = {**os.environ, "SLURM_CONF": str(config)}
    while True:
        done = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True, env=env
        )
        if done.stdout.strip() == str(len(NODES)):
            break
        if any(daemon.poll() is not None for daemon in running):
            raise SystemExit("a daemon ended")
        time.sleep(0.2)
    print("ready", flush=True)
    sys.stdin.read()
    for daemon in running:
        daemon.terminate()
    for daemon in running:
        daemon.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

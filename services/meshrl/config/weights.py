"""Configuration of the weight plane. Imports no torch: the trainer and rollout read it before they load a carrier."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from meshrl.common import plugins
from meshrl.common.checks import Loc, Problem, check_required
from meshrl.common.config import Config, Environment, Machine

CARRIERS = "meshrl.weights.carriers"
LIBRARIES: Mapping[str, str] = {
    "nccl": "meshrl.weights.nccl.libraries",
    "cuda_ipc": "meshrl.weights.ipc.devices",
}
"""Carriers that use a GPU, by a library of these packages."""
_DRIVER = Path("/dev/nvidiactl")


class NcclConfig(Config):
    """The process that holds one rank: `carrier: nccl` has one beside the trainer and one beside each engine."""

    library: str = "cupy"
    """A module of `meshrl.weights.nccl.libraries` (cupy), or a dotted path."""
    device: NonNegativeInt = Field(default=0, exclude=True)
    """The CUDA device, of those that the process sees: the first, and another only in `rollout.engine.nccl`."""
    env: Environment = Field(default_factory=dict)
    """More environment of the process, such as CUDA_VISIBLE_DEVICES, NCCL_SOCKET_IFNAME, or LD_PRELOAD
    with the libnccl.so.2 of the other side: all ranks need the identical version."""
    spare: bool = Field(default=True, exclude=True)
    """Keep one spare process started, because importing torch and cupy takes seconds."""


class IpcConfig(Config):
    """The GPU that trainer and rollout process share."""

    library: str = "cupy"
    """A module of `meshrl.weights.ipc.devices` (cupy), or a dotted path. The trainer takes the
    first CUDA device that it sees, and a rollout process finds the same GPU by its PCI address."""


class WeightsConfig(Config):
    """How weights travel from the trainer to the rollout engines, and the three deadlines of it."""

    carrier: str = "gloo"
    """A module of `meshrl.weights.carriers`, or a dotted path: gloo over TCP, nccl between GPUs, shm and
    cuda_ipc on one host, delta for what changed, disk through a directory or an object store; auto takes shm on the
    trainer's host, elsewhere nccl between GPUs, else disk where there is a `directory`, else gloo."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which floating-point tensors are sent; where a recipe does not name it and trains on a GPU,
    `model.param_dtype`. A resumed run keeps the type it began with."""
    bucket_bytes: PositiveInt = 64 << 20
    """Tensors are sent in buckets of about this many bytes; a bucket is hashed, resent and timed as one."""
    host: str = "127.0.0.1"
    """Address of the trainer's machine under which the rollout processes reach the carrier."""
    port: NonNegativeInt = 0
    """Port of the carrier's rendezvous on the trainer's machine, with `auto` this one and the next two; 0 lets the
    system choose."""
    base_s: PositiveFloat = 10.0
    """Longest wait for a bucket, which also has its bytes divided by `min_bytes_per_s`. A rollout process has three
    times this to be ready for a version, and its engine six times this to switch, a second more for each ten of
    `min_bytes_per_s`, and the rollout's deadline where it drains."""
    min_bytes_per_s: PositiveFloat = 20e6
    """A replica that moves bytes more slowly than this counts as stuck."""
    silence_s: PositiveFloat = 30.0
    """Seconds without any message after which the other side counts as dead."""
    late_quorum: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of the live replicas that must hold a version before it is committed, once stragglers have had half as
    long again as the faster half took, and a second; the others follow."""
    keep: int = Field(default=2, ge=2)
    """Versions that the carriers disk and shm keep."""
    nccl: NcclConfig = NcclConfig()
    """The processes of the `nccl` carrier."""
    ipc: IpcConfig = IpcConfig()
    """The GPU of the `cuda_ipc` carrier."""
    directory: str = ""
    """The folder of versions of the carrier disk: a URL that fsspec opens (s3://bucket/prefix), or a path that all
    see (/mnt/shared). Empty: whole versions in <run.dir>/weights."""
    anchor_every: PositiveInt = Field(default=10, le=10)
    """Versions from one whole copy in `directory` to the next; those between hold what changed. In <run.dir>/weights
    every version is whole."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The carriers that may be used; `auto` takes the first that fits, see `weights/carriers/auto.py`."""
        if self.carrier != "auto":
            return (self.carrier,)
        return ("shm", "nccl", "disk" if self.directory else "gloo")

    @property
    def offered(self) -> tuple[str, ...]:
        """The carriers by which this process can be reached: the configured one, or those of `auto` that run here."""
        if self.carrier != "auto":
            return self.choices
        return tuple(name for name in self.choices if runs_here(name))

    @property
    def auto_says(self) -> str:
        """The rule of `auto` in one line."""
        return (
            "weights.carrier auto: shm to workers on the trainer's machine; elsewhere nccl where both have a GPU and"
            f" cupy, else {self.choices[-1]}"
        )

    @property
    def may_use_gloo(self) -> bool:
        """Weights may go over a carrier that neither encrypts nor asks who receives."""
        return "gloo" in self.choices

    @property
    def ready_s(self) -> float:
        """Longest wait from the proposal of a version until a replica is ready to receive it."""
        return 3 * self.base_s

    @property
    def commit_s(self) -> float:
        """Longest time that an engine may take to switch to an empty version."""
        return 6 * self.base_s

    @property
    def beat_s(self) -> float:
        """Seconds between heartbeats: some fit into half of each deadline, after which silence tells who hangs."""
        return min(self.silence_s / 15, self.base_s / 5)

    def switch_s(self, nbytes: int) -> float:
        """Seconds that an engine gets beyond `commit_s` to load `nbytes` that lie on its machine."""
        return nbytes / (10 * self.min_bytes_per_s)

    def deadline_s(self, nbytes: int) -> float:
        """Seconds within which moving `nbytes` must show progress."""
        return self.base_s + nbytes / self.min_bytes_per_s

    def check(self, machine: Machine) -> Iterator[Problem]:
        """Check that a carrier between GPUs has its library and a GPU; `auto` skips those that cannot run."""
        at: Loc = ("weights", "carrier")
        package = LIBRARIES.get(self.carrier)
        if package is None:
            yield from check_required(at, CARRIERS, self.carrier, machine)
            return
        section = "nccl" if self.carrier == "nccl" else "ipc"
        library = getattr(self, section).library
        required = list(check_required(("weights", section, "library"), package, library, machine))
        for _, text in required:
            yield at, f"weights.carrier: {self.carrier}: {text}"
        if not required and plugins.constant(package, library, "REQUIRES", ()) and not machine.gpus:
            yield (
                at,
                f"weights.carrier: {self.carrier} moves weights between GPUs, and this machine has"
                f" {machine.no_gpu}",
            )


def runs_here(carrier: str) -> bool:
    """Whether this process has what a carrier of `auto` needs."""
    packages = {"nccl": "cupy", "gloo": "torch"}
    package = packages.get(carrier)
    if package is not None and importlib.util.find_spec(package) is None:
        return False
    return carrier != "nccl" or _DRIVER.exists()

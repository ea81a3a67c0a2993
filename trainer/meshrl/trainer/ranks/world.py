"""The trainer's ranks: this process's place among them, and the few messages that they exchange.

Control messages are bytes and flat arrays over gloo, never pickled objects. Gradients and parameters travel in
FSDP's own collectives (NCCL on GPUs).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshrl.common.device_lease import DeviceShare, chosen_device
from meshrl.common.sockets import interface_towards, is_loopback, listen_fd, loopback_interface
from meshrl.contract.errors import ConfigError, InfraError
from meshrl.trainer.config import ParallelConfig
from meshrl.trainer.model.attention_kernels import use_flash_attention_3
from meshrl.trainer.model.parallel import SequenceGroup
from meshrl.trainer.ranks import peers
from meshrl.trainer.ranks.peers import Peers, Seat

_Item = TypeVar("_Item", bound=np.generic)

CONTROL_TIMEOUT_S = 600.0
"""Deadline of a collective. Rank 0 broadcasts at least every `take_wait_s` while it waits for a batch."""
EXIT_PAUSE_S = 0.5
"""For gloo's worker threads to drop their last tensors. One that wants the interpreter while that is torn down
aborts the process: 2 of 45 pairs of ranks ended so on a loaded machine, their work done; with the pause none of 40
did, on a machine less loaded. It makes the race unlikely, not impossible."""

_SIGNS_OF_DEATH = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",
    "NCCL communicator was aborted",
    "remote process exited",
)
"""Parts of the RuntimeError texts of gloo and NCCL after a rank has died."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class World:
    """This process among the ranks of its trainer."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """FSDP's: of the ranks among which weights are sharded; [copies, ranks of a copy] where there are copies."""
    owns_group: bool
    """True when `close` has a process group to end."""
    group: dist.ProcessGroup | None = None
    """The group of `broadcast`, `all_gather` and `barrier`; None is the default group."""

    sequence: SequenceGroup | None = None
    """The ranks that forward the same rows, each a part of their tokens."""
    tensor: DeviceMesh | None = None
    """The ranks that share the matrices of a layer, and forward the same tokens."""
    experts: DeviceMesh | None = None
    """[`efsdp`, `ep`], before them `replicate` where there are copies: those of `ep` share the experts out. At least
    those that share matrices do, if the model has any."""
    peers: Peers | None = None
    """The other machines; None where there are none, or torchrun watches over them."""

    @classmethod
    def start(
        cls,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        parallel: ParallelConfig | None = None,
        *,
        peer_timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> World:
        """Join the group that torchrun's variables name, or be a world of one.

        Args:
            device: Device that computes.
            parallel: How ranks share rows and model; None: each has rows of its own and a share of the weights.
            peer_timeout_s: How long another machine may be silent; then this process ends.

        Raises:
            ConfigError: CUDA was asked for and there is none; ranks cannot be put into groups of that size.
            InfraError: not all ranks came.
        """
        parallel = parallel or ParallelConfig()
        kind = chosen_device("trainer.device", device, torch)
        if kind == "cuda":
            prepare_cuda()
        owns_group, others = not dist.is_initialized(), None
        if owns_group:
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            others = _init_group(backend, peer_timeout_s)
        place = torch.device(kind)
        if kind == "cuda":
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(place)
        size = dist.get_world_size()
        for _, fault in parallel.faults(size):
            raise ConfigError(fault)
        mesh, tensor = _meshes(kind, size, parallel)
        return cls(
            rank=dist.get_rank(),
            size=size,
            device=place,
            mesh=mesh,
            owns_group=owns_group,
            sequence=_sequence_group(kind, size, parallel),
            tensor=tensor,
            experts=_expert_mesh(kind, size, parallel),
            peers=others,
        )

    @property
    def is_main(self) -> bool:
        """Rank 0 calls the queue, writes metrics and the state of checkpoints."""
        return self.rank == 0

    @property
    def memory(self) -> int:
        """Bytes of this rank's device; of a CPU's, its share beside the other ranks of this machine."""
        if self.device.type == "cuda":
            total: int = torch.cuda.get_device_properties(self.device).total_memory
            share = DeviceShare.of()
            return int(total * (1.0 if share is None else share.memory))
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @property
    def data_rank(self) -> int:
        """Which share of the rows this rank forwards: the same for all that share tokens or matrices."""
        return self.rank // self._sharers

    @property
    def data_size(self) -> int:
        """Into how many shares rows are dealt."""
        return self.size // self._sharers

    @property
    def experts_follow_tensor(self) -> bool:
        """A model without experts may be shared so: nobody asked for more than `tensor` ranks for them."""
        tensor, experts = self.tensor, self.experts
        return tensor is not None and experts is not None and experts["ep"].size() == tensor.size()

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which FSDP averages gradients: all, but one of those that share matrices."""
        return self.mesh.size()

    @property
    def _sharers(self) -> int:
        among = 1 if self.sequence is None else self.sequence.size
        return among * (self.size // self.gradient_ranks)

    def gather_shares(self, own: npt.NDArray[_Item]) -> list[npt.NDArray[_Item]]:
        """Every share's flat array, by `data_rank`; of those that have the same rows, the first rank's."""
        return self.all_gather(own)[:: self._sharers]

    def with_own_group(self) -> World:
        """The same ranks with a gloo group of their own, for a second thread. Every rank calls this.

        Collectives of two threads over one group would be paired by chance.
        """
        return dataclasses.replace(self, group=dist.new_group(backend="gloo"), owns_group=False)

    def broadcast(self, payload: bytes = b"") -> bytes:
        """Rank 0's payload, on every rank.

        Raises:
            InfraError: a rank is gone.
        """
        if self.size == 1:
            return payload
        try:
            size = torch.tensor([len(payload)], dtype=torch.int64)
            dist.broadcast(size, src=0, group=self.group)
            if not int(size):  # gloo would take the next message for these no bytes
                return b""
            data = torch.zeros(int(size), dtype=torch.uint8)
            if self.is_main:
                data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            dist.broadcast(data, src=0, group=self.group)
        except RuntimeError as error:
            raise InfraError(
                f"rank {self.rank} of {self.size}: a peer rank is gone ({error})"
            ) from error
        return data.numpy().tobytes()

    def all_gather(self, own: npt.NDArray[_Item]) -> list[npt.NDArray[_Item]]:
        """Every rank's flat array, by rank; lengths may differ, the type may not."""
        if self.size == 1:
            return [own]
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(own)], dtype=torch.int64), group=self.group)
            longest = max(1, *(int(size) for size in sizes))
            padded = torch.from_numpy(
                np.resize(own, longest) if len(own) else np.zeros(longest, own.dtype)
            )
            parts = [torch.zeros_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self.group)
        except RuntimeError as error:
            raise InfraError(
                f"rank {self.rank} of {self.size}: a peer rank is gone ({error})"
            ) from error
        return [part.numpy()[: int(size)] for part, size in zip(parts, sizes, strict=True)]

    def all_gather_text(self, own: str) -> list[str]:
        """Every rank's text, by rank."""
        parts = self.all_gather(np.frombuffer(own.encode(), dtype=np.uint8))
        return [part.tobytes().decode() for part in parts]

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_gather(np.zeros(1, dtype=np.float32))

    def close(self) -> None:
        """Leave the group; idempotent."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()
            if self.size > 1:
                time.sleep(EXIT_PAUSE_S)


def prepare_cuda() -> None:
    """Configure torch for a process that computes on GPUs: TF32 and the allocator."""
    # TF32: what stays float32 keeps its range and loses digits that bfloat16 beside it never had.
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    if settings := allocator_settings(os.environ):
        of_torch: Any = torch._C  # there is no public name
        set_allocator = getattr(of_torch, "_accelerator_setAllocatorSettings", None)  # torch 2.10
        (set_allocator or torch.cuda.memory._set_allocator_settings)(settings)
    use_flash_attention_3(torch.cuda.get_device_capability()[0])


def allocator_settings(environment: Mapping[str, str]) -> str:
    """For torch's CUDA allocator; empty where the environment has the user's own.

    Packs differ in size: segments that grow leave fewer holes. No carrier exports torch's memory to another process,
    which such segments cannot be: `cuda_ipc` and `nccl` have buffers of their own.
    """
    theirs = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return "" if any(name in environment for name in theirs) else "expandable_segments:True"


logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
"""Silenced: it warns of each gather over two dimensions of a mesh, hundreds for each published model."""


def _meshes(
    kind: str, ranks: int, parallel: ParallelConfig
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """FSDP's ranks, and those that share matrices: of one mesh, or FSDP cannot share what those have shared."""
    copies, tensor = parallel.data_replicate, parallel.tensor
    sizes = {"replicate": copies, "fsdp": ranks // copies // tensor, "tp": tensor}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "fsdp"}
    mesh = init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))
    fsdp = mesh["replicate", "fsdp"] if copies > 1 else mesh["fsdp"]
    return fsdp, mesh["tp"] if tensor > 1 else None


def _expert_mesh(kind: str, ranks: int, parallel: ParallelConfig) -> DeviceMesh | None:
    copies, experts = parallel.data_replicate, max(parallel.expert, parallel.tensor)
    if experts == 1:
        return None
    sizes = {"replicate": copies, "efsdp": ranks // copies // experts}
    kept = {n: s for n, s in sizes.items() if n == "efsdp" or s > 1} | {"ep": experts}
    return init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _sequence_group(kind: str, ranks: int, parallel: ParallelConfig) -> SequenceGroup | None:
    size = parallel.sequence
    if size == 1:
        return None
    shape = (ranks // size // parallel.tensor, size, parallel.tensor)
    ours = init_device_mesh(kind, shape, mesh_dim_names=("dp", "sp", "tp"))["sp"]
    return SequenceGroup(group=ours.get_group(), rank=ours.get_local_rank(), size=size)


def lost_peer(error: RuntimeError) -> str | None:
    """One line where `error`, of any collective, tells that a rank has died; FSDP's collectives raise it bare."""
    text = str(error).splitlines()[0] if str(error) else ""
    if not dist.is_initialized() or not any(sign in text for sign in _SIGNS_OF_DEATH):
        return None
    reason = text.removeprefix("[").partition("] ")[2].partition(". This")[0] or text
    return f"rank {dist.get_rank()} of {dist.get_world_size()}: a peer rank is gone ({reason})"


def _init_group(backend: str, peer_timeout_s: float) -> Peers | None:
    """Join the ranks; returns the other machines, if there are others and torchrun does not watch them."""
    timeout = timedelta(seconds=CONTROL_TIMEOUT_S)
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if size == 1 or is_loopback(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    elif interface := interface_towards(address):
        # gloo would take the address of this machine's name, which is often a loopback one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store: Any
    others = None
    if size == 1:
        # A world of one needs no port: the store lives in this process.
        rank, store = 0, dist.HashStore()  # type: ignore[attr-defined]
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        dist.init_process_group(backend, timeout=timeout)  # torchrun has the store
        return None
    else:
        port, seat = int(os.environ["MASTER_PORT"]), Seat.of(os.environ)
        store = _store(address, port, seat, size, timeout)
        if seat.machines > 1:
            others = Peers(store, seat, peer_timeout_s)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        if size == 1:
            raise
        reason = str(error).splitlines()[0]
        raise InfraError(
            f"rank {rank} of {size}: the ranks did not meet at {address} ({reason})"
        ) from error
    return others


def _store(address: str, port: int, seat: Seat, size: int, timeout: timedelta) -> Any:
    """Rank 0 listens at the address that the others were given, and nowhere else."""
    if seat.machines == 1:
        return _open_store(address, port, seat.rank, size, timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        if seat.rank:
            peers.until_listening(address, port, deadline)
        try:
            store = _open_store(address, port, seat.rank, None, timeout)
            if peers.came(store, seat):
                return store
        except RuntimeError as error:  # rank 0 has ended meanwhile
            if time.monotonic() > deadline:
                raise InfraError(
                    f"rank {seat.rank} did not join {address}:{port}: {error}"
                ) from error
            continue
        peers.until_gone(store, deadline)


def _open_store(address: str, port: int, rank: int, size: int | None, timeout: timedelta) -> Any:
    """Torch's store; with `size`, once `size` ranks have connected."""
    descriptor = None
    if rank == 0:
        try:
            descriptor, port = listen_fd(address, port)
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR={address}, MASTER_PORT={port}: rank 0 cannot listen there ({error})"
            ) from error
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=size is not None,
        master_listen_fd=descriptor,
    )


class Compute:
    """Runs functions one after the other in a thread of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="trainer", initializer=self._enter
        )

    def _enter(self) -> None:
        if self._device.type == "cuda":  # the current device is a property of the thread
            torch.cuda.set_device(self._device)

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work()`.

        Raises:
            InfraError: another rank died while its collectives ran.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, _with_peers, work)

    def close(self) -> None:
        """Wait for the running function and end the thread; idempotent."""
        self._pool.shutdown(wait=True)


def _with_peers(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except RuntimeError as error:
        if lost := lost_peer(error):
            raise InfraError(lost) from error
        raise

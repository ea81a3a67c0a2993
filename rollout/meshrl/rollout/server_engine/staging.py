"""Staging of versions for a server: in a directory that it can read, or in memory of its device that it lends.

    the first version    is a file; ASKED beside it says how much memory is wanted. The loader in the server loads
                         the file, allocates, and writes ANSWER there: handles, or why not
    the next ones        arrive in that memory; ARRIVED in their directory says what lies where, with digests, and
                         the loader verifies the memory before it loads from it

The server survives its receivers. Its own end takes the memory away, and what it served from there is on no host.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import re
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

from meshrl.contract.errors import CapacityError, UnavailableError, UserError
from meshrl.contract.ports import DeviceReceiver, LentBucket
from meshrl.contract.types import Version, WeightManifest
from meshrl.rollout.server_engine.checkpoint import HEAD

log = logging.getLogger(__name__)

ASKED: Final = "lend.json"
ANSWER: Final = "lent.json"
ARRIVED: Final = "arrived.json"
HEADROOM = 1 << 30
"""Bytes of a device that stay free for activations beside a second version."""
_ANSWER_BYTES = 1 << 20
_HANDLE = re.compile(r"[0-9a-f]{2,256}")


class ServerLending:
    """Memory that one server lends, from its start to its end."""

    def __init__(self, asked: Literal["auto", "device", "host"]) -> None:
        """`asked` is `rollout.engine.weight_staging`."""
        self.staging = "host"
        """Memory of the last loaded version: `device` or `host`."""
        self._asked = asked
        self._wanted: tuple[str, WeightManifest] | None = None
        """Request of the last receiver: the kind of handles that it opens, and the version."""
        self._gpu = ""
        self._lent: tuple[LentBucket, ...] = ()
        self._given: tuple[LentBucket, ...] = ()
        self._refused = ""
        """Why the server lends nothing, when it was asked last."""
        self._unreachable = ""
        """Why what it lent was of no use: it is not asked again."""
        self._said = ""

    @property
    def lends(self) -> bool:
        """The server still has the memory that `lend` gave last."""
        return bool(self._lent) and self._given == self._lent

    async def lend(
        self, manifest: WeightManifest, receiver: DeviceReceiver
    ) -> Sequence[LentBucket]:
        """The memory that the server lends; none: the version is to arrive on the host. Raises CapacityError."""
        self._wanted = None
        if self._asked == "host":
            return self._host(manifest.version, "rollout.engine.weight_staging says so")
        if self._unreachable:
            return self._host(manifest.version, self._unreachable)
        self._wanted = receiver.memory, manifest
        sizes = tuple(bucket.nbytes for bucket in self._lent)
        if self._lent and sizes == manifest.bucket_bytes:
            try:
                if self._gpu != receiver.gpu:
                    raise UnavailableError(
                        f"the receiver is on GPU {receiver.gpu}, the server on {self._gpu}"
                        " (weights.nccl.env: CUDA_VISIBLE_DEVICES)"
                    )
                await receiver.reach(self._lent[0])
            except UnavailableError as error:
                self._wanted, self._unreachable = None, str(error)
                return self._host(manifest.version, str(error))
            self._say(manifest.version, "device", f"the server lends memory of GPU {self._gpu}")
            self._given = self._lent
            return self._lent
        if self._refused:
            return self._host(manifest.version, self._refused)
        return ()  # the file of this version asks

    def ask(self, directory: Path) -> None:
        """Ask the loader, beside a version's file, to lend memory for the next version, or to free it."""
        if self._wanted is None and not self._lent:
            return
        memory, sizes, needs = "", [], 0
        if self._wanted is not None:
            memory, manifest = self._wanted
            sizes = [*manifest.bucket_bytes]
            needs = manifest.total_bytes + 2 * max(sizes, default=0) + HEADROOM
        asked = {"memory": memory, "sizes": sizes, "needs": needs}
        (directory / ASKED).write_text(json.dumps(asked))

    def arrived(
        self, directory: Path, manifest: WeightManifest, digests: Sequence[str], *, tied: bool
    ) -> None:
        """Note a version that arrived in lent memory; a tied projection is left out."""
        tensors = [
            (spec.name, spec.dtype, spec.shape, spec.bucket, spec.offset, spec.nbytes)
            for spec in manifest.tensors
            if not (tied and spec.name == HEAD)
        ]
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"digests": [*digests], "tensors": tensors})
        (directory / ARRIVED).write_text(text)

    def loaded(self, directory: Path) -> None:
        """Note that the server has loaded a version, and has answered if it was asked."""
        self.staging = "device" if (directory / ARRIVED).is_file() else "host"
        if not (directory / ASKED).is_file():
            return
        self._lent, self._gpu = (), ""
        sizes = json.loads((directory / ASKED).read_text())["sizes"]
        try:
            with (directory / ANSWER).open("rb") as file:
                answer = json.loads(file.read(_ANSWER_BYTES))
            self._refused = str(answer.get("error", ""))
            handles = [str(each) for each in answer.get("handles", ())]
            if not self._refused and (
                len(handles) != len(sizes) or not all(map(_HANDLE.fullmatch, handles))
            ):
                raise ValueError("it lent something else")
            self._lent = tuple(map(LentBucket, handles, sizes))
            self._gpu = str(answer.get("gpu", ""))
        except (OSError, ValueError, AttributeError) as error:
            self._refused = (
                f"the server's loader gave no answer ({error}): it needs rollout.engine.update=staged and a"
                " rollout.engine.staging that it can write"
            )

    def forget(self) -> None:
        """Forget the server: it was replaced."""
        self._lent, self._gpu, self._refused, self._unreachable = (), "", "", ""

    def check_host(self, version: Version, *, first: bool) -> None:
        """Check a version that comes by the host. Raises CapacityError where only the first may."""
        if self._asked == "device" and not first and self._wanted is None:
            raise CapacityError(
                f"weights {version}: rollout.engine.weight_staging is device, and they come by the host: want"
                " weights.carrier=nccl and a device that is the engine's alone, or auto or host"
            )

    def _host(self, version: Version, why: str) -> Sequence[LentBucket]:
        if self._asked == "device":
            raise CapacityError(
                f"weights {version}: rollout.engine.weight_staging is device, and {why}; want auto or host"
            )
        self._say(version, "host", why)
        return ()

    def _say(self, version: Version, where: str, why: str) -> None:
        if where != self._said:
            log.info("from weights %s on: staged on the %s, as %s", version, where, why)
        self._said = where


SHARED_MEMORY = Path("/dev/shm")
PREFIX = "meshrl-staging-"
VERSIONS_AT_ONCE = 3
"""The served one (a restarted server needs it), the staged one, and the one being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFiles:
    """The files of one version."""

    path: Path
    temporary: bool
    """Made by `Staging`: `remove` deletes them."""
    on_device: bool = False
    """Whether they only describe weights in the server's memory; no file has the weights."""

    def remove(self) -> None:
        """Free the space."""
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)


class Staging:
    """A staging directory of this process. Making one removes those that killed processes left behind."""

    def __init__(self, parent: Path | None, *, version_bytes: int) -> None:
        """Make it in `parent`; None: in shared memory if there is space, else in the temporary directory.

        Raises:
            UserError: the directory cannot be made there.
        """
        if parent is None:
            parent = Path(tempfile.gettempdir())
            need = VERSIONS_AT_ONCE * version_bytes
            if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > need:
                parent = SHARED_MEMORY
        _remove_abandoned(parent)
        try:
            # Less the umask, for the server may run as another user; others never write there.
            self._path = parent / f"{PREFIX}{secrets.token_hex(8)}"
            self._path.mkdir(mode=0o755)
        except OSError as error:
            raise UserError(f"rollout.engine.staging {parent}: {error.strerror}") from error
        self._lock = (self._path / "lock").open("w")
        _lock(self._lock)
        self._names = itertools.count()

    def new(self, *, on_device: bool = False) -> VersionFiles:
        """A path for one version, not created yet."""
        path = self._path / str(next(self._names))
        return VersionFiles(path=path, temporary=True, on_device=on_device)

    def close(self) -> None:
        """Remove everything; idempotent."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Remove directories whose lock is free: their process has ended, in whatever container it ran."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            with (path / "lock").open("r+") as lock:
                if _lock(lock):
                    shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # being made or removed at this moment, or owned by another user


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

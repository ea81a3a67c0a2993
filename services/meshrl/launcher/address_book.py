"""The address book of a running mesh, `runs/<name>/mesh.json`, the lock that says whether it runs, and free ports."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from meshrl.common.files import replace_file
from meshrl.contract.errors import CapacityError, NotFoundError, UserError

ADDRESS_BOOK_NAME = "mesh.json"
LOCK_NAME = "up.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """Host and ports of one service."""

    kind: str
    """queue, rollout, reward, reference, trainer or feeder."""
    host: str
    port: int
    metrics_port: int

    @property
    def address(self) -> str:
        """`host:port`, as gRPC dials it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressBook:
    """The address of every service."""

    run: str
    recipe: Path
    """The recipe with all its defaults and overrides: what the services read."""
    services: Mapping[str, ServiceAddress]
    trusted_network: bool = False
    """`up` was told that calls between the machines need not be encrypted: commands about this directory are, too."""

    def of_kind(self, kind: str) -> Mapping[str, ServiceAddress]:
        """The entries of one kind by name."""
        return {name: entry for name, entry in self.services.items() if entry.kind == kind}

    def address(self, name: str) -> str:
        """Address of the service. Raises UserError when the mesh has none of that name."""
        if name not in self.services:
            raise UserError(f"this mesh has no {name} service (it has: {', '.join(self.services)})")
        return self.services[name].address

    def peers(self) -> Mapping[str, str]:
        """The addresses of the kinds that others call: each is where the service named as its kind is.

        The trainer on its first machine speaks for all; rollout workers are not called.
        """
        return {name: entry.address for name, entry in self.services.items() if name == entry.kind}

    def with_entry(self, name: str, entry: ServiceAddress) -> AddressBook:
        """A copy with this entry for `name`."""
        return replace(self, services={**self.services, name: entry})

    def without(self, name: str) -> AddressBook:
        """A copy without `name`."""
        left = {each: entry for each, entry in self.services.items() if each != name}
        return replace(self, services=left)

    def save(self, path: Path) -> None:
        """Write the file at once: a reader sees the old address book or this one, never a part."""
        fields = {
            "run": self.run,
            "recipe": self.recipe.name if self.recipe.parent == path.parent else str(self.recipe),
            "services": {name: asdict(entry) for name, entry in self.services.items()},
            "trusted_network": self.trusted_network,
        }
        replace_file(path, json.dumps(fields, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> AddressBook:
        """Read an address book. Raises NotFoundError without a file, UserError for another kind of file."""
        try:
            fields = json.loads(path.read_text())
            entries = {name: ServiceAddress(**entry) for name, entry in fields["services"].items()}
            recipe = Path(fields["recipe"])
            # Beside the book, wherever a copy of both lies now; 0.1 wrote the path from where `up` was called.
            beside = path.parent / recipe.name
            recipe = beside if len(recipe.parts) == 1 or beside.exists() else recipe
            trusted = fields.get("trusted_network", False) is True
            return cls(run=fields["run"], recipe=recipe, services=entries, trusted_network=trusted)
        except FileNotFoundError as error:
            raise NotFoundError(f"no address book at {path}; is the mesh up?") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not an address book of meshrl up: {error}") from error


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run's directory for as long as `up` lives; the kernel lets go when it dies.

    Raises:
        UserError: another `up` holds it.
    """
    path = run_dir / LOCK_NAME
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise UserError(
                f"{run_dir} is in use: another `meshrl up` (pid {holder}) runs there; stop it, "
                "or choose another run.name or run.dir"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def is_up(run_dir: Path) -> bool:
    """True while an `up` holds the run's directory."""
    try:
        with (run_dir / LOCK_NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def newest_run_dir(runs: Path = Path("runs")) -> Path:
    """The directory in `runs` whose mesh was started last. Raises NotFoundError."""
    books = sorted(runs.glob(f"*/{ADDRESS_BOOK_NAME}"), key=lambda path: path.stat().st_mtime)
    if not books:
        raise NotFoundError(
            f"no mesh was ever started here: no {runs}/*/{ADDRESS_BOOK_NAME}; want a run by its name or directory"
        )
    return books[-1].parent


LOWEST, HIGHEST = 20_000, 32_000
"""Linux takes ephemeral ports from 32768 upwards, so a service that restarts finds its port unused."""
TRIES = 200


def free_port(host: str, taken: Collection[int] = ()) -> int:
    """A port of `host` on which no program listens now, and which is not in `taken`.

    Raises:
        CapacityError: none was found.
    """
    draw = random.SystemRandom()
    for _ in range(TRIES):
        port = draw.randint(LOWEST, HIGHEST)
        if port not in taken and is_free(host, port):
            return port
    raise CapacityError(f"no free port found on {host} between {LOWEST} and {HIGHEST}")


def is_free(host: str, port: int) -> bool:
    """Whether no program listens on `port` of `host` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def is_taken(host: str, port: int) -> bool:
    """Whether another program listens on the port; with any other failure to bind, another port would not help.

    Unlike for `is_free`, a connection that ended there a moment ago does no harm: servers bind in spite of it.
    """
    if port == 0:
        return False
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False

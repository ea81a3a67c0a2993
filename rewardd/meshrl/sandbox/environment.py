"""Installs the dependencies of submitted functions from a folder of wheels, one folder per list of dependencies.

    <cache>/lock            held while one is built; the kernel releases it when the builder dies
    <cache>/.draft-…        being built; the next holder of the lock removes it
    <cache>/<hash>          complete and never changed: renamed to this name when it is durable

pip runs in a sandbox without a network, takes wheels only (so no build script runs), and asks no index. A package
that is installed beside the service in the wanted version is used as it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.files import sync
from meshrl.contract.errors import CapacityError, ConfigError
from meshrl.sandbox.sandbox import bubblewrap, no_bubblewrap

REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==(\S+))?")
BUILD_S = 300.0
MAX_BYTES = 2 << 30
"""Largest size of an unpacked environment."""
TMP_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPackages:
    """The dependencies that this service does not have itself."""

    requirements: tuple[str, ...]
    """Names, or `name==version`."""
    wheelhouse: Path
    cache: Path

    @property
    def hash(self) -> str:
        """32 hex digits over the requirements and this interpreter's version and platform."""
        content = [sorted(self.requirements), sys.implementation.cache_tag, sys.platform]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]

    @property
    def path(self) -> Path:
        """The folder of the packages once built."""
        return self.cache / self.hash

    def build(self) -> None:
        """Install the packages unless they are there. Takes seconds: call it in a thread.

        Raises:
            ConfigError: the wheelhouse has no wheel that satisfies a requirement; says which.
            CapacityError: it unpacks to more than MAX_BYTES.
        """
        if self.path.is_dir():
            return
        self.cache.mkdir(parents=True, exist_ok=True)
        with _locked(self.cache):
            for draft in self.cache.glob(".draft-*"):
                shutil.rmtree(draft)  # left by a builder that died: only we hold the lock
            if self.path.is_dir():
                return
            draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=self.cache))
            try:
                self._install(draft)
                _make_durable(draft)
                draft.chmod(0o755)
                draft.rename(self.path)
                sync(self.cache)
            finally:
                shutil.rmtree(draft, ignore_errors=True)

    def _install(self, draft: Path) -> None:
        wheelhouse = self.wheelhouse.expanduser().absolute()
        if not wheelhouse.is_dir():
            raise ConfigError(f"reward.wheelhouse: no folder {wheelhouse}")
        sandbox: list[str] = []
        if no_bubblewrap() is None:
            sandbox = bubblewrap(TMP_BYTES, [wheelhouse], [draft.absolute()])
        pip = [sys.executable, "-I", "-m", "pip", "install", "--no-index", "--only-binary", ":all:"]
        pip += ["--find-links", str(wheelhouse), "--target", str(draft.absolute())]
        pip += ["--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
        environment = {
            "PATH": os.defpath,
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "PIP_CONFIG_FILE": os.devnull,
        }
        try:
            done = subprocess.run(
                [*sandbox, *pip, *self.requirements],
                env=environment,
                capture_output=True,
                text=True,
                timeout=BUILD_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"installing {self._named} took more than {BUILD_S:g} s") from error
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            why = (errors or done.stderr.strip().splitlines() or ["pip printed no reason"])[-1]
            raise ConfigError(f"{self._named} cannot be installed from {wheelhouse}: {why[:300]}")

    @property
    def _named(self) -> str:
        return ", ".join(self.requirements)


def missing(requirements: Sequence[str]) -> tuple[str, ...]:
    """Those that are not installed beside this service in the wanted version.

    Raises:
        ConfigError: a requirement that is neither a name nor `name==version`.
    """
    return tuple(text for text in requirements if not _installed(text))


def environment_of(
    requirements: Sequence[str], wheelhouse: Path | None, cache: Path
) -> InstalledPackages | None:
    """The environment to build for `requirements`; None when all of them are installed already.

    Raises:
        ConfigError: one is not installed and there is no wheelhouse.
    """
    wanted = missing(requirements)
    if not wanted:
        return None
    if wheelhouse is None:
        raise ConfigError(
            f"dependency {wanted[0]!r} is not installed beside the service, and reward.wheelhouse is not set"
        )
    return InstalledPackages(requirements=wanted, wheelhouse=wheelhouse, cache=cache)


def _installed(text: str) -> bool:
    match = REQUIREMENT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"dependency {text[:80]!r}: want a package's name, or name==version")
    try:
        version = importlib.metadata.version(match[1])
    except importlib.metadata.PackageNotFoundError:
        return False
    return match[2] in (None, version)


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    handle = os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(
            handle, fcntl.LOCK_EX
        )  # its holder ends within BUILD_S or dies, and both release it
        yield
    finally:
        os.close(handle)


def _make_durable(draft: Path) -> None:
    """Sync every file, make it readable for all, and check the total size."""
    total = 0
    for folder, _, files in os.walk(draft, topdown=False):
        for name in files:
            path = Path(folder) / name
            if path.is_symlink():
                raise ConfigError(f"a wheel brings a link, {path.relative_to(draft)}")
            total += path.stat().st_size
            if total > MAX_BYTES:
                raise CapacityError(f"the dependencies unpack to more than {MAX_BYTES} bytes")
            path.chmod(0o644)
            sync(path)
        Path(folder).chmod(0o755)
        sync(Path(folder))

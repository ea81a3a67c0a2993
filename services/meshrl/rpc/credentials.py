"""Credentials of a run: one secret per role in its directory, what servers verify, what this process presents.

    runs/<run>/credentials/       0700
        rollout, trainer, ...     0600   the secret of one role; a process reads its own only
        verifiers.json            0600   role to SHA-256 of its secrets: what servers read

The first service makes them. A changed file is read again without a restart.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar

from meshrl.common.files import check_owner, check_private_file, make_private
from meshrl.contract.errors import ConfigError, UserError

log = logging.getLogger(__name__)

TOKEN_PREFIX: Final = "mrl_"
TOKEN_VARIABLE: Final = "MESHRL_TOKEN"
"""A credential itself. Wins over the files of a run's directory."""
FILE_VARIABLE: Final = "MESHRL_CREDENTIAL_FILE"
"""The file of a credential. Wins over MESHRL_TOKEN."""
VERIFIERS_VARIABLE: Final = "MESHRL_VERIFIERS_FILE"
PRIVATE: Final = (TOKEN_VARIABLE, FILE_VARIABLE, VERIFIERS_VARIABLE)
"""Variables that no process which a service starts may inherit."""
FOLDER: Final = "credentials"
VERIFIERS_NAME: Final = "verifiers.json"
RELOAD_S: Final = 1.0
"""A file is looked at once in this time at most."""

T = TypeVar("T")
Metadata: TypeAlias = tuple[tuple[str, str], ...]


class MeshRole(StrEnum):
    """Rights of a run's credential: `meshrl.rpc.identity` has the table. Only `operator` includes others."""

    FEEDER = "feeder"
    ROLLOUT = "rollout"
    REWARD = "reward"
    REFERENCE = "reference"
    STAGE = "stage"
    """Every stage of the recipe's own."""
    TRAINER = "trainer"
    OPERATOR = "operator"
    """Everything: the owner of the run, on the command line."""
    SUBMITTER = "submitter"
    """Submits rewards."""
    AGENT = "agent"
    """Claims sessions at a gateway."""
    TUNER = "tuner"
    """Trains models of its own: `meshrl.contract.ports.Training`."""
    READER = "reader"
    """Looks, and changes nothing."""


OWN_STAGES: Final = (MeshRole.ROLLOUT, MeshRole.REWARD, MeshRole.REFERENCE)
"""Roles that serve the stage of their name; `stage` serves every other one."""


def role_of(kind: str) -> MeshRole | None:
    """The role of a kind of service; None for the queue and for `tinker`, which call no service."""
    if kind in ("queue", "tinker"):
        return None
    built_in = (MeshRole.FEEDER, MeshRole.TRAINER, *OWN_STAGES)
    return MeshRole(kind) if kind in built_in else MeshRole.STAGE


def role_of_stage(stage: str) -> MeshRole:
    """The role that works on the rows of a run's stage of this name."""
    return MeshRole(stage) if stage in OWN_STAGES else MeshRole.STAGE


def new_token() -> tuple[str, str]:
    """A token of 256 random bits and its SHA-256; with that much entropy no slow hash is needed."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return token, sha256(token)


def sha256(token: str) -> str:
    """Hash of a token, which a server keeps instead of the token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class Reloaded(Generic[T]):
    """The result of `read` for a file, read again when the file changes. An invalid file is logged and ignored."""

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], T],
        *,
        every_s: float = RELOAD_S,
        also: Sequence[Path] = (),
    ) -> None:
        """Raises what `read` raises; `also` are more files that it reads."""
        self._every_s = every_s
        self._path = path
        self._paths = (path, *also)
        self._read = read
        self._stamp = self._look()
        self._value = read(path)
        self._next = time.monotonic() + every_s

    def get(self) -> T:
        """The present value."""
        now = time.monotonic()
        if now < self._next:
            return self._value
        self._next = now + self._every_s
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._value = self._read(self._path)
            except (OSError, UserError) as error:
                log.error("what was read before stays valid: %s", error)
        return self._value

    def _look(self) -> list[tuple[int, int, int]]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0, 0)
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


class Credential:
    """A client's credential: a token, or the file of one."""

    def __init__(self, source: str | Path) -> None:
        """Raises ConfigError for a file that cannot be read, holds no token, or that others may read or write."""
        self.path = source if isinstance(source, Path) else None
        if isinstance(source, Path):
            self._metadata = Reloaded(source, lambda path: _bearer(_read_token(path))).get
        else:
            fixed = _bearer(source)
            self._metadata = lambda: fixed

    def metadata(self) -> Metadata:
        """`authorization` metadata of a call."""
        return self._metadata()

    def environment(self) -> Mapping[str, str]:
        """Variables that give another process of this service the same credential."""
        if self.path is not None:
            return {FILE_VARIABLE: str(self.path)}
        return {TOKEN_VARIABLE: self.metadata()[0][1].removeprefix("Bearer ")}


_in_use: Credential | None = None
_verifiers_in_use: Path | None = None


def use(credential: Credential | None, verifiers: Path | None = None) -> None:
    """Set what this process's connections present, and what its servers verify with."""
    global _in_use, _verifiers_in_use
    _in_use, _verifiers_in_use = credential, verifiers


def in_use() -> Credential | None:
    """The credential of this process: as set by `use`, else as the environment says."""
    return _in_use if _in_use is not None else from_environment()


def verifiers_in_use() -> Path | None:
    """The verifiers of this process's servers; None: they ask for no credentials."""
    return _verifiers_in_use


def from_environment() -> Credential | None:
    """The credential of MESHRL_CREDENTIAL_FILE or MESHRL_TOKEN. Raises ConfigError."""
    if file := os.environ.get(FILE_VARIABLE):
        return Credential(Path(file))
    token = os.environ.get(TOKEN_VARIABLE)
    return Credential(token) if token else None


def forget_environment() -> None:
    """Remove them from the environment, so that no process that a service starts inherits them."""
    for name in PRIVATE:
        os.environ.pop(name, None)


def file_of_role(run_dir: Path, role: MeshRole) -> Path:
    """Path of the credential of a role."""
    return run_dir / FOLDER / role


def verifiers_file(run_dir: Path) -> Path:
    """Path of the verifiers."""
    return run_dir / FOLDER / VERIFIERS_NAME


def use_run_directory(run_dir: Path, role: MeshRole = MeshRole.OPERATOR) -> None:
    """Present the run's credential of `role`, unless the environment names one. A run without any goes without."""
    file = file_of_role(run_dir, role)
    credential = from_environment()
    if credential is None and file.exists():
        credential = Credential(file)
    use(credential, _verifiers_in_use)


def use_for_service(
    run_dir: Path, kind: str, *, credential_file: Path | None = None, verifiers: Path | None = None
) -> None:
    """Set what a service of this kind presents and verifies: the given files, else those of its run.

    A run without credentials gets them. No process that the service starts inherits any.

    Raises:
        ConfigError: a file cannot be used. UserError: the run's directory cannot be written.
    """
    credential = Credential(credential_file) if credential_file is not None else from_environment()
    forget_environment()
    role = role_of(kind)
    if verifiers is None or (credential is None and role is not None):
        open_run_directory(run_dir)
    if credential is None and role is not None:
        credential = Credential(file_of_role(run_dir, role))
    use(credential, verifiers if verifiers is not None else verifiers_file(run_dir))


def service_environment(run_dir: Path, kind: str) -> Mapping[str, str]:
    """Variables that `up` sets for a service of this kind; empty ones hide those of the user's environment."""
    role = role_of(kind)
    return {
        TOKEN_VARIABLE: "",
        FILE_VARIABLE: "" if role is None else str(file_of_role(run_dir, role).absolute()),
        VERIFIERS_VARIABLE: str(verifiers_file(run_dir).absolute()),
    }


def own_environment() -> Mapping[str, str]:
    """Variables that give a further process of this service the same credential and verifiers."""
    found = dict(_in_use.environment()) if _in_use is not None else {}
    if _verifiers_in_use is not None:
        found[VERIFIERS_VARIABLE] = str(_verifiers_in_use)
    return found


def open_run_directory(run_dir: Path) -> None:
    """Make the directory of a run and its credentials where they are missing, closed to other users.

    Raises:
        UserError: it cannot be written. ConfigError: it cannot be made, or is another user's.
    """
    make_private(run_dir, "run.dir")
    check_owner(run_dir, "run.dir")
    tighten(run_dir)
    ensure_credentials(run_dir)


def hand_out(folder: Path) -> None:
    """Make a run's credentials in `folder`/operator, where there are none, and copy each role's to `folder`/<role>.

    There its services find `credential` and `verifiers.json`; the queue gets the second only.

    Raises:
        UserError: it cannot be written.
    """
    made = folder / MeshRole.OPERATOR
    open_run_directory(made)
    try:
        for role in ("queue", *MeshRole):
            own = folder / role
            own.mkdir(mode=0o700, exist_ok=True)
            _replace_private(own / VERIFIERS_NAME, verifiers_file(made).read_text())
            if role != "queue":
                _replace_private(own / "credential", (made / FOLDER / role).read_text())
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from error


def ensure_credentials(run_dir: Path) -> None:
    """Make the credentials that a run lacks. Safe for several processes and machines at once.

    Raises:
        UserError: the directory cannot be written. ConfigError: it is another user's.
    """
    folder = run_dir / FOLDER
    if folder.exists():
        check_owner(folder, "credentials")
        tighten(folder)
        try:
            _add_roles(folder)
        except OSError as error:
            log.warning("%s gets no new roles: %s", folder, error.strerror)
        except (ValueError, TypeError, AttributeError):
            pass  # `read_verifiers` says what is wrong
        return
    try:
        draft = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.", dir=run_dir))
        try:
            verifiers = {}
            for role in MeshRole:
                token, digest = new_token()
                _write_private(draft / role, token + "\n")
                verifiers[role.value] = [digest]
            _write_private(draft / VERIFIERS_NAME, json.dumps(verifiers, indent=2) + "\n")
            # A name that exists with files in it is not replaced: another process was faster.
            draft.rename(folder)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            if not folder.exists():
                raise
    except OSError as error:
        raise UserError(f"{run_dir}: no credentials can be made: {error.strerror}") from error


def _add_roles(folder: Path) -> None:
    """Make the credentials of roles that are newer than the run. A role whose list was emptied stays without one."""
    path = folder / VERIFIERS_NAME
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits only while another process adds
        verifiers = json.loads(path.read_text())
        missing = [role for role in MeshRole if role.value not in verifiers]
        for role in missing:
            token, digest = new_token()
            _replace_private(folder / role, token + "\n")
            verifiers[role.value] = [digest]
        if missing:
            # Last: a role that a kill leaves out is made again.
            _replace_private(path, json.dumps(verifiers, indent=2) + "\n")
    finally:
        os.close(descriptor)


def tighten(directory: Path) -> None:
    """Close a directory of ours to other users, and say so in one line."""
    mode = directory.stat().st_mode & 0o777
    if not mode & 0o077:
        return
    try:
        directory.chmod(mode & 0o700)
    except OSError as error:
        log.warning(
            "%s is open to other users (mode %o) and cannot be closed: %s",
            directory,
            mode,
            error.strerror,
        )
    else:
        log.warning(
            "%s was open to other users (mode %o): now only its owner may enter", directory, mode
        )


def read_verifiers(path: Path) -> Mapping[str, MeshRole]:
    """SHA-256 to role. Raises ConfigError."""
    check_private_file(path, "verifiers")
    try:
        fields = json.loads(path.read_text())
        return {digest: MeshRole(role) for role, digests in fields.items() for digest in digests}
    except OSError as error:
        raise ConfigError(f"verifiers {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'verifiers {path}: want {{"<role>": ["<SHA-256 in hex>"]}} with the roles {", ".join(MeshRole)}'
        ) from error


def _read_token(path: Path) -> str:
    check_private_file(path, "credential")
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"credential {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"credential {path}: not a text file") from error


def _bearer(token: str) -> Metadata:
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("a credential is one word of ASCII characters")
    return (("authorization", f"Bearer {token}"),)


def _write_private(path: Path, text: str) -> None:
    path.touch(0o600, exist_ok=False)
    path.write_text(text)


def _replace_private(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    _write_private(draft, text)
    draft.replace(path)

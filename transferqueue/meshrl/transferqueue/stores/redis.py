"""The shared store: one Redis (or Valkey), 7.0 or later, with its append-only file; a commit is one script.

    event loop ──apply──▶ stage … stage ──▶ commit script: fencing token? number? then everything ──▶ answered
               ──read───▶ HMGET

Exactly once: every commit has a number, which changes in the commit's own script. A commit whose answer was lost is
sent again; if it is there already, it changes nothing.

One owner: a queue holds a subscription, which dies with its connection, so a second queue is refused while the first
one lives; a former owner has an older fencing token, which every script compares.

A server that forgot acknowledged commits (failover, power cut without `appendfsync always`) shows an older number:
the current commit is refused, and `load` goes back to what the server has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final
from uuid import uuid4

from redis.asyncio import Redis

from meshrl.common.files import check_private_file
from meshrl.contract.errors import CapacityError, CorruptError, InfraError, MeshError, UserError
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.several_processes import processes_noted, refusal
from meshrl.transferqueue.store import (
    FORMAT,
    Operation,
    OwnerLostError,
    RowsEvictedError,
    Table,
)
from meshrl.transferqueue.stores._redis_connection import (
    CLAIM,
    COMMIT,
    RELEASE,
    STAGE,
    Keys,
    RedisConnection,
    broken_promise,
    in_parts,
    settings_of,
)

log = logging.getLogger(__name__)

REQUIRES = ("redis",)

OWNER_GONE_S: Final = 0.5
"""How long a queue that opens waits for Redis to notice that the former owner's connection is closed."""
PART_BYTES: Final = 64 << 20
"""A commit beyond it is staged in parts, so that no command grows without bound."""
PIECE_BYTES: Final = 8 << 20
"""The size of one piece of an export."""
_SPOOLED: Final = struct.Struct("<BIQ")
"""Header of each record in an export's file: table, bytes of the key, bytes of the value."""
READ_KEYS: Final = 1024
SCAN_RECORDS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long the store waits for Redis, and how often it asks."""

    open_s: float = 5.0
    """How long a queue that opens waits for a Redis that starts."""
    restart_s: float = 30.0
    """How long a commit waits for a Redis that restarts or fails over; then it is refused. The queue tries on."""
    ask_memory_every_s: float = 1.0
    """Pause between two requests for Redis' free memory; bytes written meanwhile are subtracted."""


class RedisStore:
    """Two hashes of a Redis under one prefix."""

    def __init__(
        self,
        connection: RedisConnection,
        prefix: str,
        *,
        durability: str = "always",
        reserve_bytes: int = 0,
        part_bytes: int = PART_BYTES,
        timing: Timing = Timing(),
    ) -> None:
        self._connection = connection
        self._keys = Keys(prefix)
        self._durability = durability
        self._reserve_bytes = reserve_bytes
        self._part_bytes = part_bytes
        self._timing = timing
        self._owner = uuid4().hex
        self._generation = 0
        """The fencing token; 0 before the first claim."""
        self._sequence = 0
        """The number of the last commit that was acknowledged."""
        self._applying = asyncio.Lock()
        """Held by a commit, and by an export, which shows one moment."""
        self._free: float = float("inf")
        self._used = 0
        self._fault = ""
        """The Redis setting that keeps less than the promised durability; empty: none."""
        self._ask_memory_at = 0.0
        """When to ask for `_free`, `_used` and `_fault` again; event loop time."""
        self._asking: asyncio.Task[None] | None = None
        """A question of those who were refused."""
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the store, its server and its prefix, for messages."""
        return f"queue store {self._connection.name} {self._keys.prefix}"

    # --- the port

    async def load(self) -> Sequence[tuple[bytes, bytes]]:
        """Own the store (again: calls still on their way from before are fenced) and return META.

        Raises:
            UserError: owned by a queue that lives, another format, wrong password, a Redis that promises less than
                `durability` asks or has evicted records. OwnerLostError: another queue took over. UnavailableError:
                no master can be reached.
        """
        timeout_s = self._timing.restart_s if self._generation else self._timing.open_s
        await self._connection.call(self._check_server, timeout_s)
        await self._connection.subscribe(self._channel + self._owner, timeout_s)
        if not self._generation:
            await self._refuse_several()
        await self._claim(timeout_s)
        await self._refuse_evicted(timeout_s)
        await self._ask_free_memory()
        found = [pair async for part in self._scan(self._keys[Table.META]) for pair in part]
        return sorted(dict(found).items())

    async def apply(self, operations: Sequence[Operation]) -> None:
        """One script. Raises CapacityError, InfraError, OwnerLostError; none of `operations` was done then."""
        async with self._applying:
            await self._ask_free_memory()
            number = self._sequence + 1
            state = await self._write(operations, number)
            if state == "unstaged":
                # The server restarted with part of what was staged: from the beginning.
                await self._clear_staged()
                state = await self._write(operations, number)
            if state != "done":
                raise InfraError(f"{self.name}: commit {number} ended as {state!r}")
            self._sequence = number
            self._free -= sum(len(operation.value or b"") for operation in operations)

    async def read(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The PAYLOAD values. Raises InfraError, also for a server that forgot acknowledged commits."""
        parts = [keys[at : at + READ_KEYS] for at in range(0, len(keys), READ_KEYS)]

        async def ask(client: Redis) -> list[Any]:
            async with client.pipeline(transaction=False) as pipe:
                pipe.hget(self._keys["head"], "sequence")
                for part in parts:
                    pipe.hmget(self._keys[Table.PAYLOAD], list(part))
                return await pipe.execute()

        if not parts:
            return []
        sequence = self._sequence
        found, *values = await self._connection.call(ask, self._timing.restart_s)
        if int(found or 0) < sequence:
            raise self._lost_commits(found)
        return [value for part in values for value in part]

    def check_room(self, nbytes: int) -> None:
        """Compare with `maxmemory` and what was left of it a moment ago. Raises CapacityError.

        Redis is asked again then: a queue that takes no rows may have nothing to commit.
        """
        if not self._fault and self._free >= nbytes + self._reserve_bytes:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_again(), name="queue-redis-memory")
        if self._fault:
            raise CapacityError(f"{self._fault}; rows get in again once it is set back", free=0)
        raise CapacityError(
            f"{self.name}: {self._free:.0f} bytes free of Redis' maxmemory, {nbytes} wanted and"
            f" {self._reserve_bytes} kept in reserve; rows get in again once there is space",
            free=self._free,
            wanted=nbytes,
        )

    def size_bytes(self) -> int:
        """Memory that Redis uses, as of the last commits; all its users together."""
        return self._used

    async def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record of this moment. Redis has no snapshots: commits wait until all is in a file, then no more.

        Raises:
            CapacityError: no room for the file, in the folder for temporary ones.
        """
        with TemporaryFile(prefix="meshrl-export-") as file:
            try:
                async with self._applying:
                    for table in Table:
                        async for part in self._scan(self._keys[table]):
                            await asyncio.to_thread(_spool, file, table, part)
                    await asyncio.to_thread(file.seek, 0)
            except OSError as error:
                raise CapacityError(f"{self.name}: no room to export: {error.strerror}") from error
            while piece := await asyncio.to_thread(_unspool, file):
                yield piece

    async def close(self) -> None:
        """Release the store to other queues and disconnect; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        if self._generation:
            keys = [self._keys["head"]]
            try:
                fence = [self._owner, self._generation]
                await self._script(RELEASE, keys, fence, self._timing.open_s)
            except MeshError as error:
                log.warning(
                    "%s: not released; Redis notices when the connection ends: %s", self.name, error
                )
        await self._connection.close()

    # --- owning

    @property
    def _channel(self) -> str:
        return self._keys["owner:"]

    async def _refuse_several(self) -> None:
        """Raises UserError where these are the keys of one of several queue processes. Writes nothing."""
        prefix, _, number = self._keys.prefix.rpartition("-")
        if await self._processes(self._keys) > 1 or (
            number.isdecimal() and await self._processes(Keys(prefix)) > max(1, int(number))
        ):
            raise refusal(f"{self.name} is one of several queue processes")

    async def _processes(self, keys: Keys) -> int:
        """How many processes the queue is whose first store has these keys."""
        found = [pair async for part in self._scan(keys[Table.META], b"[rs]*") for pair in part]
        return processes_noted(found)

    async def _claim(self, timeout_s: float) -> None:
        keys = [self._keys["head"], *self._keys.tables(), *self._keys.staged()]
        who = f"{os.getpid()} on {socket.gethostname()}"
        clock = asyncio.get_running_loop().time
        give_up_at, pause_s = clock() + OWNER_GONE_S, 0.02
        while True:
            given = [FORMAT, self._owner, who, self._generation, self._channel]
            state, *rest = await self._script(CLAIM, keys, given, timeout_s)
            # A former owner that was killed a moment ago may still look alive.
            if state != b"owned" or clock() > give_up_at:
                break
            await asyncio.sleep(pause_s)
            pause_s *= 2
        if state != b"ok":
            raise self._refusal(state, rest)
        self._generation, sequence = map(int, rest)
        if sequence < self._sequence:
            log.error(
                "%s: the server forgot %d acknowledged commits; the queue goes back to commit %d",
                self.name,
                self._sequence - sequence,
                sequence,
            )
        self._sequence = sequence

    def _refusal(self, state: bytes, rest: Sequence[bytes]) -> Exception:
        detail = rest[0].decode(errors="replace") if rest else ""
        match state:
            case b"owned":
                return UserError(f"{self.name} is already open in process {detail}")
            case b"fenced":
                return OwnerLostError(
                    f"{self.name}: process {detail} took it over, this one is done"
                )
            case b"format":
                return UserError(
                    f"{self.name} is stored in format {detail}, this meshrl reads format {FORMAT}:"
                    " finish the run with the version that wrote it, or choose another redis_prefix"
                )
            case b"empty":
                return InfraError(
                    f"{self.name}: the server holds nothing of this queue any more, which was at commit"
                    f" {self._sequence}: bring its append-only file or a replica back, or restore a backup"
                )
        return CorruptError(
            f"{self.name}: these keys exist and are not a queue store, or Redis has evicted its head"
        )

    async def _check_server(self, client: Redis) -> None:
        """Raises UserError for a server that is too old, evicts, or promises less than we do."""
        info = await client.info("server")
        version = str(info.get("redis_version", "0"))
        if int(version.split(".")[0]) < 7:
            raise UserError(
                f"redis at {self._connection.name} is version {version}; want 7.0 or later"
            )
        found = await settings_of(client)
        if "appendfsync" not in found:
            log.warning("redis at %s does not show all of its settings", self._connection.name)
        if fault := broken_promise(self._connection.name, found, self._durability):
            raise UserError(fault)
        limit = int(found["maxmemory"])
        if not self._generation and 0 < limit <= self._reserve_bytes:
            raise UserError(
                f"redis at {self._connection.name}: maxmemory {limit} is not above queue.reserve_bytes"
                f" {self._reserve_bytes}, so no row fits; raise maxmemory, or lower queue.reserve_bytes"
            )
        if found["appendonly"] != "yes":
            log.warning(
                "redis at %s has appendonly no: a restart of Redis loses the whole queue",
                self._connection.name,
            )

    async def _refuse_evicted(self, timeout_s: float) -> None:
        """Raises UserError where records are gone that no commit has deleted."""

        async def ask(client: Redis) -> list[Any]:
            async with client.pipeline(transaction=True) as pipe:
                pipe.hmget(self._keys["head"], ["sequence", "counted", *Table])
                for key in self._keys.tables():
                    pipe.hlen(key)
                return await pipe.execute()

        (sequence, counted, *kept), *has = await self._connection.call(ask, timeout_s)
        for table, records, wanted in zip(self._keys.tables(), has, kept, strict=True):
            if counted == sequence and records != int(wanted or 0):
                raise UserError(self._evicted(table, records, int(wanted)))

    def _evicted(self, table: str, records: int, wanted: int) -> str:
        return (
            f"{self.name}: {table} holds {records} records of {wanted}: Redis has evicted them, or a client deleted"
            " them; restore a backup (meshrl queue restore)"
        )

    # --- writing

    async def _write(self, operations: Sequence[Operation], number: int) -> str:
        """Stage what is too big for one command, then commit; the script's answer."""
        fence = [self._owner, self._generation, number]
        puts: dict[Table, list[bytes]] = {}
        staged: list[int] = []
        for table, list_key in zip(Table, self._keys.staged(), strict=True):
            *full, puts[table] = in_parts(operations, table, self._part_bytes)
            length = 0
            for part in full:
                state = await self._answer(
                    STAGE, [self._keys["head"], list_key], [*fence, length, *part]
                )
                if state != "ok":
                    return state
                length += len(part)
            staged.append(length)
        gone = {
            t: [op.key for op in operations if op.table is t and op.value is None] for t in Table
        }
        counts = [len(puts[Table.META]), len(puts[Table.PAYLOAD]), len(gone[Table.META])]
        items = [item for found in (puts, gone) for table in Table for item in found[table]]
        keys = [self._keys["head"], *self._keys.tables(), *self._keys.staged()]
        return await self._answer(COMMIT, keys, [*fence, *staged, *counts, *items])

    async def _answer(self, script: str, keys: list[str], arguments: list[Any]) -> str:
        state, *rest = await self._script(script, keys, arguments, self._timing.restart_s)
        if state == b"lost":
            generation, sequence, name = int(rest[0]), rest[1], rest[2].decode()
            if generation > self._generation:
                raise OwnerLostError(f"{self.name}: process {name} took it over, this one is done")
            raise self._lost_commits(sequence)
        if state == b"evicted":
            table, records, wanted = rest
            raise RowsEvictedError(self._evicted(table.decode(), int(records), int(wanted)))
        return str(state, "ascii")

    def _lost_commits(self, sequence: bytes | None) -> InfraError:
        return InfraError(
            f"{self.name}: the server is at commit {int(sequence or 0)}, this queue was told that commit"
            f" {self._sequence} is stored: the server lost what came in between"
        )

    async def _clear_staged(self) -> None:
        await self._connection.call(
            lambda client: client.delete(*self._keys.staged()), self._timing.restart_s
        )

    async def _script(
        self, script: str, keys: list[str], arguments: list[Any], timeout_s: float
    ) -> list[bytes]:
        # EVAL, not EVALSHA: a promoted replica or a restarted server would not know the script.
        async def ask(client: Redis) -> Any:
            return await client.eval(script, len(keys), *keys, *arguments)

        found: list[bytes] = await self._connection.call(ask, timeout_s)
        return found

    async def _ask_free_memory(self) -> None:
        """Ask for the memory and the settings of Redis, at most every `ask_memory_every_s` seconds."""
        now = asyncio.get_running_loop().time()
        if now < self._ask_memory_at:
            return

        async def ask(client: Redis) -> Any:
            return await client.info("memory"), await settings_of(client)

        memory, settings = await self._connection.call(ask, self._timing.restart_s)
        before = self._fault
        self._fault = fault = broken_promise(self._connection.name, settings, self._durability)
        if fault and not before:
            log.error("%s; no rows are taken until it is set back", fault)
        self._used = int(memory["used_memory"])
        limit = int(memory.get("maxmemory", 0))
        self._free = limit - self._used if limit else float("inf")
        self._ask_memory_at = now + self._timing.ask_memory_every_s

    async def _ask_again(self) -> None:
        """Ask for free memory again after a refusal; commits report a Redis that does not answer."""
        with suppress(MeshError):
            await self._ask_free_memory()

    async def _scan(
        self, key: str, match: bytes | None = None
    ) -> AsyncGenerator[list[tuple[bytes, bytes]], None]:
        """A hash, or its fields that match, in parts."""
        cursor = 0
        while True:

            async def ask(client: Redis, at: int = cursor) -> Any:
                return await client.hscan(key, at, match, SCAN_RECORDS)

            cursor, part = await self._connection.call(ask, self._timing.restart_s)
            if part:
                yield list(part.items())
            if cursor == 0:
                return


def _spool(file: IO[bytes], table: Table, part: Iterable[tuple[bytes, bytes]]) -> None:
    for key, value in part:
        file.write(_SPOOLED.pack([*Table].index(table), len(key), len(value)) + key)
        file.write(value)


def _unspool(file: IO[bytes]) -> list[Operation]:
    """The next records of at least PIECE_BYTES; none at the end."""
    piece: list[Operation] = []
    size = 0
    while size < PIECE_BYTES and (head := file.read(_SPOOLED.size)):
        table, key_bytes, value_bytes = _SPOOLED.unpack(head)
        key, value = file.read(key_bytes), file.read(value_bytes)
        piece.append(Operation([*Table][table], key, value))
        size += key_bytes + value_bytes
    return piece


def build(config: QueueConfig, path: Path, *, timing: Timing | None = None) -> RedisStore:
    """The store at `config.redis_url`, under `config.redis_prefix` or else the run's path.

    Raises:
        UserError: a URL that makes no sense, or a password file that cannot be read.
    """
    password = None
    if config.redis_password_file is not None:
        check_private_file(config.redis_password_file, "queue.redis_password_file")
        try:
            password = config.redis_password_file.read_text().strip()
        except OSError as error:
            raise UserError(
                f"queue.redis_password_file: {config.redis_password_file}: {error.strerror}"
            ) from error
    return RedisStore(
        RedisConnection([url.strip() for url in config.redis_url.split(",")], password),
        config.redis_prefix or str(path.absolute()),
        durability=config.durability,
        reserve_bytes=config.reserve_bytes,
        timing=timing or Timing(restart_s=config.redis_wait_s),
    )

"""How the two ends of a channel find each other: the trainer listens, a replica connects, names itself, gets the id.

The endpoint, `host:port/token`, goes to the replicas over the coordinator's own stream; a peer without the token is
refused. One frame travels each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from meshrl.contract.errors import ConfigError, MeshError, UnavailableError, from_detail
from meshrl.weights.nccl import messages
from meshrl.weights.nccl.process import Facts

logger = logging.getLogger(__name__)
_HELLO_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPeer:
    """The connection of a replica's end that waits for its answer."""

    facts: Facts
    rank: int
    _writer: asyncio.StreamWriter

    async def answer(self, unique_id: bytes) -> None:
        """Let it join. Raises UnavailableError when it has disconnected."""
        await self._send(unique_id=unique_id.hex())

    async def refuse(self, error: MeshError) -> None:
        """Send it the reason."""
        with contextlib.suppress(UnavailableError):
            await self._send(code=error.code, refused=str(error))

    def leave(self) -> None:
        """Close the connection; idempotent."""
        self._writer.close()

    async def _send(self, **frame: Any) -> None:
        try:
            self._writer.write(messages.pack(frame))
            await self._writer.drain()
        except OSError as error:
            raise UnavailableError(f"the replica's end went away: {error}") from error
        finally:
            self._writer.close()


class _Expected:
    """The other ends of one channel: those that have come, and all once they have; None after `forget`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.peers: dict[int, WaitingPeer] = {}
        self.all: asyncio.Future[list[WaitingPeer] | None] = (
            asyncio.get_running_loop().create_future()
        )

    def wants(self, rank: int) -> bool:
        """Whether this end may come, and has not."""
        return 1 <= rank <= self.count and rank not in self.peers and not self.all.done()

    def add(self, peer: WaitingPeer) -> None:
        """It has come."""
        self.peers[peer.rank] = peer
        if len(self.peers) == self.count:
            self.all.set_result(list(self.peers.values()))


class Rendezvous:
    """The trainer's side: one listening socket for all channels."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._token = secrets.token_hex(16)
        self._expected: dict[str, _Expected] = {}
        self._callers: set[asyncio.StreamWriter] = set()

    async def listen(self, host: str, port: int) -> str:
        """The endpoint. Raises ConfigError when it cannot be had."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port)
        except OSError as error:
            raise ConfigError(
                f"weights.host/port: cannot listen on {host}:{port} ({error.strerror})"
            ) from error
        return f"{host}:{self._server.sockets[0].getsockname()[1]}/{self._token}"

    def expect(self, prefix: str, size: int) -> None:
        """From now on the other ends of the channel `prefix`, ranks 1 to `size` - 1, are accepted, each once."""
        self._expected[prefix] = _Expected(size - 1)

    async def wait_for(self, prefix: str) -> list[WaitingPeer]:
        """The other ends, once all have connected; the caller has the deadline.

        Raises:
            UnavailableError: after `forget`.
        """
        expected = self._expected.get(prefix)
        peers = await asyncio.shield(expected.all) if expected is not None else None
        if peers is None:
            raise UnavailableError("it was aborted")
        return peers

    def forget(self, prefix: str) -> None:
        """The channel is over; idempotent."""
        expected = self._expected.pop(prefix, None)
        if expected is None:
            return
        if not expected.all.done():
            expected.all.set_result(None)
        for peer in expected.peers.values():
            peer.leave()

    async def close(self) -> None:
        """Stop listening, disconnect all peers; idempotent."""
        for prefix in list(self._expected):
            self.forget(prefix)
        for writer in self._callers:
            writer.close()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._callers.add(writer)
        try:
            async with asyncio.timeout(_HELLO_S):
                hello = await messages.read(reader)
            if hello is None or not hmac.compare_digest(str(hello.get("token")), self._token):
                raise UnavailableError("the token is wrong")
            expected = self._expected.get(str(hello.get("prefix")))
            rank = hello.get("rank")
            if expected is None or not isinstance(rank, int) or not expected.wants(rank):
                raise UnavailableError(f"no end waits for weight channel {hello.get('prefix')}")
            facts = Facts(library=str(hello.get("library")), version=str(hello.get("version")))
            expected.add(WaitingPeer(facts=facts, rank=rank, _writer=writer))
            # The connection stays open until it is answered; the caller of `wait_for` has a deadline.
            await writer.wait_closed()
        except (MeshError, TimeoutError, OSError) as error:
            logger.warning("a connection to the weight carrier was refused: %s", error)
        finally:
            self._callers.discard(writer)
            writer.close()


async def connect(endpoint: str, prefix: str, facts: Facts, rank: int = 1) -> bytes:
    """The replica's side: the unique id, bytes[128]; the caller has the deadline.

    Raises:
        UnavailableError: nobody listens, or the trainer's end aborted the channel.
        MeshError: the reason why the trainer's end refuses.
    """
    address, _, token = endpoint.partition("/")
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except (OSError, ValueError) as error:
        raise UnavailableError(
            f"no trainer's end of the weight channel at {address}: {error}"
        ) from error
    try:
        hello = {"token": token, "prefix": prefix, "rank": rank, **asdict(facts)}
        writer.write(messages.pack(hello))
        answer = await messages.read(reader)
    finally:
        writer.close()
    if answer is None:
        raise UnavailableError(
            f"the trainer's end of weight channel {prefix} closed the connection"
        )
    if "refused" in answer:
        raise from_detail(answer["code"], answer["refused"], {})
    return bytes.fromhex(answer["unique_id"])


def check_same_nccl(trainer: Facts, replica: Facts) -> None:
    """Raises ConfigError unless both can be ranks of one communicator."""
    if trainer.library != replica.library:
        raise ConfigError(
            f"weights.nccl.library is {trainer.library} at the trainer, {replica.library} at the replica"
        )
    if trainer.version != replica.version:
        raise ConfigError(
            f"the trainer has NCCL {trainer.version}, the replica {replica.version}, and all ranks need the "
            "identical one: give both the same libnccl.so.2 (weights.nccl.env: LD_PRELOAD)"
        )

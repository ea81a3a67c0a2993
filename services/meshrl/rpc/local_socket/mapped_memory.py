"""The caller's end of shared_memory.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from meshrl.contract.codec.bulk import Frame
from meshrl.contract.frames import Shared
from meshrl.rpc.local_socket.shared_memory import (
    KEY_BYTES,
    LEAST_BYTES,
    MOST_AT_ONCE,
    REGION_BYTES,
    Copier,
    Grant,
    Mapping,
    Reference,
    Word,
    address_of_link,
    check,
    placed,
)
from meshrl.rpc.local_socket.wire import Wire, WireError, is_own

STOCK: Final = 3
"""So many times the bytes of the last call may lie ready: calls overlap, and regions are answered late."""
IDLE_S: Final = 10.0
"""Regions to write to are given back after so many seconds without a write."""
AGAIN_S: Final = 0.1
"""After a moment in which the service took no more words."""
_WORDS: Final = 4096
"""In one packet."""
_GRANTED_BYTES: Final = 16 * (1 + MOST_AT_ONCE)


class Link:
    """What a client says of the memory. It ends when nothing that lies there is held any more."""

    def __init__(self, name: str) -> None:
        """To the service whose socket has this name. Raises OSError: it shares none, or not with this process."""
        self._process = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._words: deque[int] = deque()
        """What is to be said: garbage is collected at any time, in any thread."""
        self._flushes = False
        self.socket: Final = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        )
        try:
            self.socket.connect(address_of_link(name))
            if not is_own(self.socket):
                raise PermissionError("it is another user's")
        except OSError:
            self.socket.close()
            raise

    def __del__(self) -> None:
        if hasattr(self, "socket"):
            self.socket.close()

    def say(self, word: Word, number: int = 0) -> bool:
        """Say it now; False if the service does not take it yet, or never."""
        self._words.append(word << 56 | number)
        return self._flush()

    def watch(self, view: Shared, word: Word, number: int) -> None:
        """Say this when all that is cut from a view is gone."""
        weakref.finalize(view, self._soon, word << 56 | number).atexit = False

    def _soon(self, word: int) -> None:
        if os.getpid() != self._process:  # a copy of the process that holds it
            return
        self._words.append(word)
        if not self._flushes:
            self._flushes = True
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the loop has ended
                self._flush()

    def _flush(self) -> bool:
        self._flushes = False
        while self._words:
            said: list[int] = []
            with contextlib.suppress(IndexError):  # another thread has taken the rest
                while len(said) < _WORDS:
                    said.append(self._words.popleft())
            try:
                self.socket.send(np.array(said, "<u8").tobytes())
            except ConnectionError:  # the service is gone, and knows of nothing any more
                return False
            except OSError:
                self._words.extendleft(reversed(said))
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._loop.call_later, AGAIN_S, self._flush)
                return False
        return True


class MappedMemory:
    """The memory of a service."""

    def __init__(self, name: str) -> None:
        """Ask the service whose socket has this name. Raises OSError: it shares none, or not with this process."""
        self.key: Final = secrets.token_bytes(KEY_BYTES)
        """What calls say of the link."""
        self.ended = False
        """The service hands it out no more."""
        self._link = Link(name)
        self._link.socket.send(self.key)
        self._loop = asyncio.get_running_loop()
        self._read: Mapping | None = None
        """Once the service has handed it out, after the first call that it let in."""
        self._written: Mapping | None = None
        self._copier: Copier | None = None
        self._stock: list[Grant] = []
        """Regions to write to."""
        self._asked = False
        self._idle: asyncio.TimerHandle | None = None

    def receive(self) -> None:
        """Take the memory if the service has handed it out."""
        if self._read is not None or self.ended:
            return
        try:
            said, files, *_ = socket.recv_fds(self._link.socket, 8, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            said, files = b"", []
        try:
            size = int.from_bytes(said, "little")
            # Whoever reads cannot write by mistake over what others read.
            self._read = Mapping(files[0], size, writes=False)
            self._written = Mapping(files[0], size, writes=True)
            self._copier = Copier(self, self._take)
            self._link.say(Word.MAPPED)
        except (OSError, ValueError, IndexError):
            self.ended = True
        finally:
            for file in files:
                os.close(file)

    def placed(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """The frames, those copied for which there is room; all as they were until the service has answered."""
        wanted = sum(len(frame) for frame in frames if len(frame) >= LEAST_BYTES)
        self.receive()
        if self._copier is None or not wanted:
            return frames
        self._hear()
        found = [self._copier.copy(frame) for frame in frames]
        self._ask(-(-STOCK * wanted // REGION_BYTES) - len(self._stock))
        if self._idle is not None:
            self._idle.cancel()
        self._idle = self._loop.call_later(IDLE_S, self._give_back)
        return found

    def room(self, size: int) -> Shared | None:
        """For a frame of `size` bytes that is to be `placed`."""
        return None if self._copier is None else self._copier.room(size)

    def place(self, frame: Frame) -> Shared | None:
        """A frame that was `placed`; None for others."""
        return placed(frame, self)

    def leave(self) -> None:
        """Write no more. The link ends with the last frame that is held."""
        if self._idle is not None:
            self._idle.cancel()
        self._give_back()
        self._copier = None

    def view(self, answer: int) -> Shared:
        """Everything, to cut the frames of an answer from. The service hears when the last of them is gone."""
        if self._read is None:
            raise WireError("a reference to memory that is not mapped")
        found = self._read.everything.view(Shared)
        self._link.watch(found, Word.DONE, answer)
        return found

    def touch(self, at: int, size: int) -> None:
        """Have the pages at hand that are read now."""
        if self._read is not None:
            for number in range(at // REGION_BYTES, -(-(at + size) // REGION_BYTES)):
                self._read.touch(number)

    def received(self, answer: int) -> None:
        """From now on the frames of an answer are held. Raises WireError if that cannot be said."""
        if not self._link.say(Word.RECEIVED, answer):
            raise WireError("the service does not hear that its answer is held")

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            while packet := self._link.socket.recv(_GRANTED_BYTES):
                said = np.frombuffer(packet, "<u8").tolist()
                self._stock += map(Grant._make, zip(said[2::2], said[3::2], strict=False))
                self._asked = False

    def _ask(self, wanted: int) -> None:
        if wanted > 0 and not self._asked:
            self._asked = True
            self._link.say(Word.WANT, wanted)

    def _take(self) -> tuple[Grant, Shared] | None:
        if not self._stock:
            self._hear()
        if self._written is None or not self._stock:
            return None
        grant = self._stock.pop()
        region = self._written.region(grant.region)
        self._link.watch(region, Word.GIVE_BACK, grant.number)
        return grant, region

    def _give_back(self) -> None:
        self._hear()
        while self._stock:
            self._link.say(Word.GIVE_BACK, self._stock.pop().number)


class Answer:
    """The frames of one answer."""

    def __init__(self, memory: MappedMemory | None) -> None:
        self._memory = memory
        self._number = 0
        self._view: Shared | None = None

    def frame(self, number: int, reference: Reference) -> memoryview:
        """What a reference of answer `number` is to, read-only. Raises WireError."""
        if self._memory is None:
            raise WireError("a reference to memory that is not mapped")
        if self._view is None:
            self._number, self._view = number, self._memory.view(number)
        end = reference.at + reference.size
        if number != self._number or end > len(self._view):
            raise WireError("a reference to no memory, or of another answer")
        self._memory.touch(reference.at, reference.size)
        frame = self._view.room(reference.at, reference.size, None, reference.at).frame()
        check(frame, reference)
        return frame

    def received(self, wire: Wire) -> None:
        """All of it has come by this connection. Raises WireError."""
        if self._memory is not None and self._view is not None:
            self._memory.received(self._number)
            # Said after the connection was closed, it may not have been heard in time.
            if wire.lost:
                raise WireError("the connection was closed")

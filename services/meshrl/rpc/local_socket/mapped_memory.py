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

from meshrl.rpc.local_socket.shared_memory import (
    KEY_BYTES,
    LEAST_BYTES,
    MOST_AT_ONCE,
    REGION_BYTES,
    Copier,
    Frame,
    Mapping,
    Reference,
    Shared,
    Word,
    address_of_link,
    check,
    place_of,
)
from meshrl.rpc.local_socket.wire import WireError, is_own

STOCK: Final = 3
"""So many times the bytes of the last call may lie ready: calls overlap, and regions are answered late."""
_WORDS: Final = 4096
"""In one packet."""
_GRANTED_BYTES: Final = 4 * (1 + MOST_AT_ONCE)


class MappedMemory:
    """The memory of a service. Whatever lies in it keeps the link open, and with it the service's promise."""

    def __init__(self, name: str) -> None:
        """Ask the service whose socket has this name. Raises OSError: it shares none, or not with this process."""
        self.key: Final = secrets.token_bytes(KEY_BYTES)
        """What calls say of this link."""
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._link.connect(address_of_link(name))
            if not is_own(self._link):
                raise PermissionError("it is another user's")
            self._link.send(self.key)
        except OSError:
            self._link.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._mapping: Mapping | None = None
        """Once it is mapped."""
        self._stock: list[int] = []
        """Regions to write to."""
        self._asked = False
        self._copier: Copier | None = None
        self._words: deque[int] = deque()
        """What is to be said: garbage is collected at any time, in any thread."""
        self._flushes = False

    def __del__(self) -> None:
        self._link.close()

    def is_mapped(self) -> bool:
        """Whether the service has handed it out: after the first call that it let in."""
        if self._mapping is None:
            with contextlib.suppress(OSError):
                said, files, *_ = socket.recv_fds(self._link, 8, 1, socket.MSG_CMSG_CLOEXEC)
                if files:
                    self._map(files[0], int.from_bytes(said, "little"))
        return self._mapping is not None

    def placed(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """The frames, those copied for which there is room; all as they were until the service has answered."""
        if not self.is_mapped() or self._copier is None:
            return frames
        self._hear()
        found = [self._copier.copy(frame) for frame in frames]
        self._ask(sum(len(frame) for frame in frames if len(frame) >= LEAST_BYTES))
        return found

    def place(self, frame: Frame) -> int | None:
        """Where a frame lies that was `placed`; None for others."""
        return place_of(frame, self)

    def leave(self) -> None:
        """Write no more. The link ends with the last frame that is held."""
        self._copier = None

    def view(self, answer: int) -> Shared:
        """Everything, to cut the frames of an answer from. The service hears when the last of them is gone."""
        if self._mapping is None:
            raise WireError("a reference to memory that is not mapped")
        found = self._mapping.everything.view(Shared)
        self._watch(found, Word.DONE, answer)
        return found

    def touch(self, at: int, size: int) -> None:
        """Have the pages at hand that are read now."""
        if self._mapping is not None:
            for number in range(at // REGION_BYTES, -(-(at + size) // REGION_BYTES)):
                self._mapping.touch(number)

    def received(self, answer: int) -> None:
        """From now on the frames of an answer are held. Raises WireError if that cannot be said."""
        self._words.append(Word.RECEIVED << 56 | answer)
        self.flush()
        if self._words:
            raise WireError("the service does not hear")

    def flush(self) -> None:
        """Say what is to be said, as far as the service takes it now."""
        self._flushes = False
        while self._words:
            count = min(_WORDS, len(self._words))
            said = [self._words.popleft() for _ in range(count)]
            try:
                self._link.send(np.array(said, "<u8").tobytes())
            except BlockingIOError:
                self._words.extendleft(reversed(said))
                return
            except OSError:  # it is gone, and knows of nothing any more
                return

    def _map(self, file: int, size: int) -> None:
        try:
            self._mapping = Mapping(file, size)
        finally:
            os.close(file)
        self._copier = Copier(self, self._take)
        self._words.append(Word.WANT << 56)
        self.flush()

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            while packet := self._link.recv(_GRANTED_BYTES):
                count, *numbers = np.frombuffer(packet, "<u4").tolist()
                self._stock += numbers[:count]
                self._asked = False

    def _ask(self, nbytes: int) -> None:
        wanted = -(-STOCK * nbytes // REGION_BYTES) - len(self._stock)
        if wanted > 0 and not self._asked:
            self._asked = True
            self._words.append(Word.WANT << 56 | wanted)
            self.flush()

    def _take(self) -> tuple[int, Shared] | None:
        if self._mapping is None or not self._stock:
            return None
        number = self._stock.pop(0)
        region = self._mapping.region(number)
        self._watch(region, Word.GIVE_BACK, number)
        return number, region

    def _watch(self, view: Shared, word: Word, number: int) -> None:
        weakref.finalize(view, self._over, word << 56 | number).atexit = False

    def _over(self, word: int) -> None:
        self._words.append(word)
        if not self._flushes:
            self._flushes = True
            try:
                self._loop.call_soon_threadsafe(self.flush)
            except RuntimeError:  # the loop has ended
                self.flush()


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
        frame = self._view.cut(reference.at, reference.size).frame(None, reference.at)
        check(frame, reference)
        return frame

    def received(self) -> None:
        """All of it has come. Raises WireError."""
        if self._memory is not None and self._view is not None:
            self._memory.received(self._number)

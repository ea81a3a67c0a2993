"""Learns of added shards, for one router: a call to shard 0 that waits until the shard list changes."""

from __future__ import annotations

import asyncio
from typing import Final, Never

from meshrl.transferqueue.sharding.port import Shard, ShardNote
from meshrl.transferqueue.sharding.run_shards import ShardsAdded
from meshrl.transferqueue.sharding.shard_list import SHARD_LIST

DAY_S: Final = 86_400.0


class ShardWatcher:
    """One pending call at a time, shared by all who work through the router.

    waits for: a shard list other than the learned one. unblocked by: a write of it on shard 0. A call that fails,
    because shard 0 was away for longer than its client retries, is made again by the next user. produces:
    ShardsAdded.
    """

    def __init__(self, first: Shard) -> None:
        self._first = first
        self._asking: asyncio.Task[ShardNote] | None = None
        self._changed = asyncio.Event()
        self.learned: str | None = None
        """The shard list, as written, that the router has learned; None before the first one."""

    async def close(self) -> None:
        """Ask no more; idempotent."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def read(self) -> str:
        """The shard list as it is written now."""
        return (await self._first.note(SHARD_LIST)).text

    def learn(self, text: str) -> None:
        """Note that the router knows this shard list, and wait for the next one."""
        if text != self.learned and self._asking is not None:
            self._asking.cancel()
            self._asking = None
        self.learned = text
        self._ask()
        self._notify()

    def has_news(self) -> bool:
        """True when there is something to learn."""
        if self.learned is None:
            return True
        self._ask()
        return self._answer() not in (None, self.learned)

    async def until_shards_added(self, since: str) -> Never:
        """Wait until the shard list is another one than `since`, then raise ShardsAdded."""
        while self.learned == since and not self.has_news():
            await self._changed.wait()
        raise ShardsAdded

    def _ask(self) -> None:
        if self._asking is None or (self._asking.done() and self._answer() is None):
            question = self._first.note(SHARD_LIST, other_than=self.learned, wait_s=DAY_S)
            self._asking = asyncio.ensure_future(question)
            self._asking.add_done_callback(self._on_answer)

    def _on_answer(self, asking: asyncio.Task[ShardNote]) -> None:
        if not asking.cancelled() and asking.exception() is None:
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()

    def _answer(self) -> str | None:
        """The text that was answered; None while there is no answer, or after a call that failed."""
        asking = self._asking
        if asking is None or not asking.done() or asking.cancelled() or asking.exception():
            return None
        return asking.result().text

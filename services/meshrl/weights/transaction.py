"""The state of one version: which replicas must hold it, which do, and when it is committed. No I/O.

PARKED ◀──────▶ PREPARING ──────▶ COMMITTING ──────▶ COMMITTED
  no replica      members prepare    prepared ones         at least one engine serves it
                                     switch                and no member is still switching
A version whose source changed after its manifest was made is DROPPED before any engine has seen it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version


class Phase(StrEnum):
    """The progress of a version."""

    PARKED = "parked"
    PREPARING = "preparing"
    COMMITTING = "committing"
    COMMITTED = "committed"
    DROPPED = "dropped"


class Transaction:
    """A version and the replicas that take part in it; replicas are named by their generation.

    Members are fixed when the version is proposed, so that new joiners cannot delay it. A replica that joins later is
    a follower; followers become the members only when no member is left.
    """

    def __init__(
        self, source: WeightSource, members: Iterable[int], late_quorum: float = 1.0
    ) -> None:
        """`late_quorum` is the share of the members that suffices once `accept_late_quorum` was called."""
        self.source = source
        self.phase = Phase.PARKED
        self._quorum = 1.0
        self._late_quorum = late_quorum
        self._members = set(members)
        self._followers: set[int] = set()
        self._prepared: set[int] = set()
        self._committed: set[int] = set()
        self._advance()

    @property
    def version(self) -> Version:
        """The version."""
        return self.source.manifest.version

    @property
    def may_commit(self) -> bool:
        """True once the fleet has decided: a replica that holds the version may switch to it."""
        return self.phase in (Phase.COMMITTING, Phase.COMMITTED)

    @property
    def half_prepared(self) -> bool:
        """True once half of the members hold the version, and others are waited for."""
        holders = len(self._members & self._prepared)
        return self.phase is Phase.PREPARING and 2 * holders >= len(self._members)

    def accept_late_quorum(self) -> None:
        """The stragglers' time is over: from now on the late quorum suffices."""
        self._quorum = self._late_quorum
        self._advance()

    def enter(self, replica: int) -> None:
        """A replica begins to receive the version."""
        if replica not in self._members:
            self._followers.add(replica)
        self._advance()

    def prepared(self, replica: int) -> None:
        """A replica holds the version, verified, beside its engine."""
        self._prepared.add(replica)
        self._advance()

    def committed(self, replica: int) -> None:
        """A replica's engine serves the version."""
        self._committed.add(replica)
        self._advance()

    def holds(self, replica: int) -> None:
        """A replica that joins serves the version already."""
        self._followers.add(replica)
        self._prepared.add(replica)
        self.committed(replica)

    def leave(self, replica: int) -> None:
        """A replica is out. That it once committed still counts: rows of this version may exist."""
        for group in (self._members, self._followers, self._prepared):
            group.discard(replica)
        self._advance()

    def drop(self) -> None:
        """Withdraw the version; without effect once it may be committed."""
        if not self.may_commit:
            self.phase = Phase.DROPPED

    def _advance(self) -> None:
        if self.phase in (Phase.DROPPED, Phase.COMMITTED):
            return
        if self.phase is Phase.COMMITTING:
            if self._members - self._committed:
                return
            if self._committed:
                self.phase = Phase.COMMITTED
                return
        # Still open, or open again because all members died between COMMIT and COMMITTED.
        if not self._members:
            self._members, self._followers = self._followers, set()
        holders = self._members & self._prepared
        self.phase = Phase.PREPARING if self._members else Phase.PARKED
        if holders and len(holders) >= math.ceil(self._quorum * len(self._members)):
            # Stragglers outside the quorum go on by themselves; only the holders are waited for.
            self._followers |= self._members - holders
            self._members = holders
            self.phase = Phase.COMMITTING
            self._advance()

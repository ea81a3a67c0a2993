from __future__ import annotations

from meshrl.contract.types import Version
from meshrl.weights.transaction import Phase, Transaction
from tests.doubles.weights import StubSource

SOURCE = StubSource("run", Version(1, 3), buckets=1, bucket_bytes=64)


def transaction(*members: int, late_quorum: float = 1.0) -> Transaction:
    opened = Transaction(SOURCE, members, late_quorum)
    for member in members:
        opened.enter(member)
    return opened


def test_a_version_commits_once_every_member_holds_it_and_serves_it() -> None:
    version = transaction(1, 2)
    version.prepared(1)
    assert version.phase is Phase.PREPARING
    version.prepared(2)
    assert version.may_commit
    version.committed(1)
    assert version.phase is Phase.COMMITTING
    version.committed(2)
    assert version.phase is Phase.COMMITTED


def test_without_members_a_version_is_parked_and_the_first_joiner_carries_it() -> None:
    version = transaction()
    assert version.phase is Phase.PARKED
    version.enter(7)
    assert version.phase is Phase.PREPARING
    version.prepared(7)
    version.committed(7)
    assert version.phase is Phase.COMMITTED


def test_a_member_that_dies_is_waited_for_no_more() -> None:
    version = transaction(1, 2)
    version.prepared(1)
    version.leave(2)
    assert version.may_commit
    version.committed(1)
    assert version.phase is Phase.COMMITTED


def test_a_version_that_nobody_is_left_for_is_parked_again() -> None:
    version = transaction(1)
    version.prepared(1)
    assert version.may_commit
    version.leave(1)
    assert version.phase is Phase.PARKED
    assert not version.may_commit


def test_a_joiner_does_not_hold_the_members_up() -> None:
    version = transaction(1)
    version.enter(2)
    version.prepared(1)
    version.committed(1)
    assert version.phase is Phase.COMMITTED


def test_a_joiner_takes_the_place_of_members_that_all_died() -> None:
    version = transaction(1)
    version.enter(2)
    version.leave(1)
    assert version.phase is Phase.PREPARING
    version.prepared(2)
    assert version.may_commit


def test_a_version_that_one_engine_served_stays_committed_when_that_engine_dies() -> None:
    version = transaction(1, 2)
    version.prepared(1)
    version.prepared(2)
    version.committed(1)
    version.leave(1)
    assert version.phase is Phase.COMMITTING
    version.leave(2)
    assert version.phase is Phase.COMMITTED


def test_a_quorum_is_rounded_up() -> None:
    version = transaction(1, 2, 3, late_quorum=0.5)
    version.accept_late_quorum()
    version.prepared(1)
    assert not version.may_commit
    version.prepared(2)
    assert version.may_commit
    version.committed(1)
    version.committed(2)
    assert version.phase is Phase.COMMITTED


def test_the_late_quorum_counts_only_once_the_stragglers_have_had_their_time() -> None:
    version = transaction(1, 2, 3, late_quorum=0.6)
    version.prepared(1)
    assert not version.half_prepared
    version.prepared(2)
    assert version.half_prepared
    assert not version.may_commit
    version.accept_late_quorum()
    assert version.may_commit
    assert not version.half_prepared


def test_a_replica_that_comes_serving_the_version_commits_it_when_nobody_else_is_left() -> None:
    version = transaction()
    version.holds(4)
    assert version.phase is Phase.COMMITTED
    waiting = transaction(1)
    waiting.holds(4)
    assert waiting.phase is Phase.PREPARING


def test_a_version_that_may_be_committed_can_be_dropped_no_more() -> None:
    version = transaction(1)
    version.prepared(1)
    version.drop()
    assert version.phase is Phase.COMMITTING
    early = transaction(1)
    early.drop()
    assert early.phase is Phase.DROPPED
    early.prepared(1)
    assert not early.may_commit

"""The methods of the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from meshrl.contract.codec import (
    TEXT,
    UID,
    Field,
    decode_batch,
    decode_lease,
    encode_batch,
    encode_lease,
)
from meshrl.contract.ports import Queue
from meshrl.contract.types import Uid
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.methods import STAGES, Table, bare_row, row, service
from meshrl.v1 import queue_pb2 as pb

FEEDER, TRAINER, READER = MeshRole.FEEDER, MeshRole.TRAINER, MeshRole.READER
SERVICES: Final = (*STAGES, FEEDER, TRAINER)


def _encode_held(token_of: Mapping[Uid, int]) -> list[pb.HeldRow]:
    """Rows with their fencing tokens."""
    return [pb.HeldRow(uid=UID.encode(uid), token=token) for uid, token in token_of.items()]


def _decode_held(messages: Sequence[pb.HeldRow]) -> dict[Uid, int]:
    return {UID.decode(message.uid): message.token for message in messages}


class QueueTable(Table, Queue, service=service(pb.DESCRIPTOR, "Queue")):
    """meshrl.v1.Queue."""

    by_hand = (bare_row("Attend", *STAGES, waits=True),)
    open_run = row("OpenRun", FEEDER, TRAINER)(Queue.open_run)
    run_state = row("GetRunState", *SERVICES, READER)(Queue.run_state)
    acquire = row("Acquire", TRAINER)(Queue.acquire)
    # The trainer admits the prompts of an evaluation.
    admit = row("Admit", FEEDER, TRAINER, waits=True)(Queue.admit)
    close_feed = row("CloseFeed", FEEDER, TRAINER)(Queue.close_feed)
    lease = row(
        "Lease", *STAGES, waits=True, payload=True, reply=Field(encode_lease, decode_lease)
    )(Queue.lease)
    renew = row("Renew", *STAGES)(Queue.renew)
    write = row("Write", *STAGES, payload=True)(Queue.write)
    append = row("Append", *STAGES, payload=True)(Queue.append)
    redo = row("Redo", TRAINER)(Queue.redo)
    fail = row(
        "Fail",
        *STAGES,
        given={"uid": Field(name="row.uid"), "token": Field(name="row.token"), "reason": TEXT},
    )(Queue.fail)
    release = row(
        "Release",
        *STAGES,
        given={"token_of": Field(_encode_held, _decode_held, name="rows")},
    )(Queue.release)
    take = row("Take", TRAINER, waits=True, reply=Field(encode_batch, decode_batch))(Queue.take)
    fetch = row("Fetch", *STAGES, TRAINER, payload=True)(Queue.fetch)
    filter = row("Filter", TRAINER, given={"reason": TEXT})(Queue.filter)
    settle = row("Settle", TRAINER)(Queue.settle)
    publish = row("Publish", TRAINER)(Queue.publish)
    commit = row("Commit", TRAINER)(Queue.commit)
    rewind = row("Rewind", TRAINER)(Queue.rewind)
    ledger = row("GetLedger", *SERVICES, READER)(Queue.ledger)
    dead_letters = row("ListDeadLetters", TRAINER, READER)(Queue.dead_letters)
    # Not repeated: rows that failed again meanwhile would be replayed too.
    replay = row("Replay", repeatable=False)(Queue.replay)
    why_waiting = row("WhyWaiting", *SERVICES, READER)(Queue.why_waiting)

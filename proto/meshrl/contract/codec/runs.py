"""The queue's control methods: run specifications and states, held rows, ledgers, waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshrl.contract.codec.types import (
    OUTCOMES,
    EnumCodec,
    decode_uid,
    decode_uids,
    decode_version,
    decoder,
    encode_uid,
    encode_uids,
    encode_version,
    encoder,
    printable,
    require,
)
from meshrl.contract.types import (
    DeadLetter,
    GroupPolicy,
    Ledger,
    RunSpec,
    RunState,
    StageSpec,
    StalePolicy,
    Uid,
    Waiting,
)
from meshrl.v1 import queue_pb2 as pb

GROUP_POLICIES = EnumCodec(GroupPolicy, pb.GroupPolicy, "GROUP_POLICY")
STALE_POLICIES = EnumCodec(StalePolicy, pb.StalePolicy, "STALE_POLICY")


@encoder
def encode_run_spec(spec: RunSpec) -> pb.RunSpec:
    """Any specification."""
    return pb.RunSpec(
        run=spec.run,
        group_size=spec.group_size,
        batch_groups=spec.batch_groups,
        max_staleness=spec.max_staleness,
        stages=[
            pb.StageSpec(name=stage.name, reads=stage.reads, writes=stage.writes)
            for stage in spec.stages
        ],
        group_policy=GROUP_POLICIES.number_of[spec.group_policy],
        group_k=spec.group_k,
        stale_policy=STALE_POLICIES.number_of[spec.stale_policy],
        max_attempts=spec.max_attempts,
        lease_ttl_s=spec.lease_ttl_s,
        resident_batches=spec.resident_batches,
        resident_bytes=spec.resident_bytes,
        resident_tokens=spec.resident_tokens,
        sampler=spec.sampler,
        gated=spec.gated,
        priority=spec.priority,
        vocabulary=spec.vocabulary,
    )


@decoder
def decode_run_spec(message: pb.RunSpec) -> RunSpec:
    """Raises UserError for an unknown policy; the queue checks the numbers."""
    return RunSpec(
        run=message.run,
        group_size=message.group_size,
        batch_groups=message.batch_groups,
        max_staleness=message.max_staleness,
        stages=tuple(
            StageSpec(name=stage.name, reads=tuple(stage.reads), writes=tuple(stage.writes))
            for stage in message.stages
        ),
        group_policy=GROUP_POLICIES.member_of[message.group_policy],
        group_k=message.group_k,
        stale_policy=STALE_POLICIES.member_of[message.stale_policy],
        max_attempts=message.max_attempts,
        lease_ttl_s=message.lease_ttl_s,
        resident_batches=message.resident_batches,
        resident_bytes=message.resident_bytes,
        resident_tokens=message.resident_tokens,
        sampler=message.sampler,
        gated=message.gated,
        priority=message.priority,
        vocabulary=message.vocabulary,
    )


@encoder
def encode_run_state(state: RunState) -> pb.RunState:
    """Any state."""
    return pb.RunState(
        spec=encode_run_spec(state.spec),
        epoch=state.epoch,
        published=encode_version(state.published),
        cursor=state.cursor,
        feed_closed=state.feed_closed,
        committed_step=state.committed_step,
    )


@decoder
def decode_run_state(message: pb.RunState) -> RunState:
    """Raises UserError."""
    require(message, "spec", "published")
    return RunState(
        spec=decode_run_spec(message.spec),
        epoch=message.epoch,
        published=decode_version(message.published),
        cursor=message.cursor,
        feed_closed=message.feed_closed,
        committed_step=message.committed_step,
    )


@encoder
def encode_held_rows(token_of: Mapping[Uid, int]) -> list[pb.HeldRow]:
    """Rows with their fencing tokens."""
    return [pb.HeldRow(uid=encode_uid(uid), token=token) for uid, token in token_of.items()]


@decoder
def decode_held_rows(messages: Iterable[pb.HeldRow]) -> dict[Uid, int]:
    """Raises UserError."""
    return {decode_uid(message.uid): message.token for message in messages}


@encoder
def encode_ledger(ledger: Ledger) -> pb.Ledger:
    """Any ledger, balanced or not."""
    return pb.Ledger(
        run=ledger.run,
        admitted=ledger.admitted,
        trained=ledger.trained,
        filtered=ledger.filtered,
        stale=ledger.stale,
        dead_lettered=ledger.dead_lettered,
        resident=ledger.resident,
    )


@decoder
def decode_ledger(message: pb.Ledger) -> Ledger:
    """Any message is a ledger."""
    return Ledger(
        run=message.run,
        admitted=message.admitted,
        trained=message.trained,
        filtered=dict(message.filtered),
        stale=dict(message.stale),
        dead_lettered=dict(message.dead_lettered),
        resident=dict(message.resident),
    )


@encoder
def encode_dead_letter(letter: DeadLetter) -> pb.DeadLetter:
    """Any dead letter."""
    return pb.DeadLetter(
        uid=encode_uid(letter.uid),
        stage=letter.stage,
        outcome=OUTCOMES.number_of[letter.outcome],
        reason=printable(letter.reason),
        attempts=letter.attempts,
        prompt=printable(letter.prompt),
    )


@decoder
def decode_dead_letter(message: pb.DeadLetter) -> DeadLetter:
    """Raises UserError."""
    return DeadLetter(
        uid=decode_uid(message.uid),
        stage=message.stage,
        outcome=OUTCOMES.member_of[message.outcome],
        reason=message.reason,
        attempts=message.attempts,
        prompt=message.prompt,
    )


@encoder
def encode_waiting(waiting: Waiting) -> pb.Waiting:
    """Any wait."""
    return pb.Waiting(
        who=printable(waiting.who),
        what=printable(waiting.what),
        since_s=waiting.since_s,
        owners=map(printable, waiting.owners),
        uids=encode_uids(waiting.uids),
    )


@decoder
def decode_waiting(message: pb.Waiting) -> Waiting:
    """Raises UserError."""
    return Waiting(
        who=message.who,
        what=message.what,
        since_s=message.since_s,
        owners=tuple(message.owners),
        uids=tuple(decode_uids(message.uids)),
    )

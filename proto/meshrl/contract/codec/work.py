"""Messages of the engine, the judges and the trainer."""

from __future__ import annotations

import numpy as np

from meshrl.contract.codec.types import (
    OUTCOMES,
    EnumCodec,
    decode_array,
    decode_uid,
    decode_version,
    decoder,
    encode_array,
    encode_uid,
    encode_version,
    encoder,
    from_json,
    json_object,
    lossless_json,
    printable,
    require,
)
from meshrl.contract.types import (
    EngineStats,
    Message,
    Sample,
    Score,
    TrainerPhase,
    TrainerStatus,
)
from meshrl.v1 import reward_pb2, rollout_pb2, trainer_pb2, trajectory_pb2

PHASES = EnumCodec(TrainerPhase, trainer_pb2.TrainerPhase, "TRAINER_PHASE")


@encoder
def encode_engine_stats(stats: EngineStats) -> rollout_pb2.EngineStats:
    """Any stats."""
    return rollout_pb2.EngineStats(
        version=encode_version(stats.version),
        running=stats.running,
        capacity=stats.capacity,
        tokens_generated=stats.tokens_generated,
        tokens_per_s=stats.tokens_per_s,
        updates=stats.updates,
        update_pause_s=stats.update_pause_s,
        staging=stats.staging,
    )


@decoder
def decode_engine_stats(message: rollout_pb2.EngineStats) -> EngineStats:
    """Raises UserError."""
    require(message, "version")
    return EngineStats(
        version=decode_version(message.version),
        running=message.running,
        capacity=message.capacity,
        tokens_generated=message.tokens_generated,
        tokens_per_s=message.tokens_per_s,
        updates=message.updates,
        update_pause_s=message.update_pause_s,
        staging=message.staging,
    )


@encoder
def encode_sample(sample: Sample) -> reward_pb2.Sample:
    """Raises UserError when `ground_truth` or `extra_info` is not JSON."""
    return reward_pb2.Sample(
        uid=encode_uid(sample.uid),
        data_source=sample.data_source,
        solution=printable(sample.solution),
        ground_truth_json=lossless_json(sample.ground_truth),
        extra_info_json=lossless_json(dict(sample.extra_info) or None),
        messages=[trajectory_pb2.Message(role=m.role, content=m.content) for m in sample.messages],
    )


@decoder
def decode_sample(message: reward_pb2.Sample) -> Sample:
    """Raises UserError."""
    return Sample(
        uid=decode_uid(message.uid),
        data_source=message.data_source,
        solution=message.solution,
        ground_truth=from_json(message.ground_truth_json),
        extra_info=json_object(message.extra_info_json),
        messages=tuple([Message(role=m.role, content=m.content) for m in message.messages]),
    )


@encoder
def encode_score(score: Score) -> reward_pb2.Score:
    """Any score."""
    tokens = score.token_rewards
    return reward_pb2.Score(
        uid=encode_uid(score.uid),
        outcome=OUTCOMES.number_of[score.outcome],
        score=score.score,
        components=score.components,
        reason=printable(score.reason),
        reward_hash=score.reward_hash,
        token_rewards=None if tokens is None else encode_array(np.array(tokens, np.float64)),
        texts={name: printable(text) for name, text in score.texts.items()},
    )


@decoder
def decode_score(message: reward_pb2.Score) -> Score:
    """Raises UserError."""
    tokens: tuple[float, ...] | None = None
    if message.HasField("token_rewards"):
        array = decode_array(message.token_rewards, "float64", axes=1, name="token_rewards")
        tokens = tuple(array.tolist())
    return Score(
        uid=decode_uid(message.uid),
        outcome=OUTCOMES.member_of[message.outcome],
        score=message.score,
        components=dict(message.components),
        reason=message.reason,
        reward_hash=message.reward_hash,
        token_rewards=tokens,
        texts=dict(message.texts),
    )


@encoder
def encode_trainer_status(status: TrainerStatus) -> trainer_pb2.TrainerStatus:
    """Any status."""
    return trainer_pb2.TrainerStatus(
        step=status.step,
        total_steps=status.total_steps,
        version=encode_version(status.version),
        phase=PHASES.number_of[status.phase],
        reward_mean=status.reward_mean,
        held_out_score=status.held_out_score,
        tokens_per_s=status.tokens_per_s,
        samples=status.samples,
        staleness=status.staleness,
        metrics=status.metrics,
        eta_s=status.eta_s,
        waiting_for=printable(status.waiting_for),
    )


@decoder
def decode_trainer_status(message: trainer_pb2.TrainerStatus) -> TrainerStatus:
    """Raises UserError."""
    require(message, "version")
    return TrainerStatus(
        step=message.step,
        total_steps=message.total_steps,
        version=decode_version(message.version),
        phase=PHASES.member_of[message.phase],
        reward_mean=message.reward_mean if message.HasField("reward_mean") else None,
        held_out_score=message.held_out_score if message.HasField("held_out_score") else None,
        tokens_per_s=message.tokens_per_s,
        samples=message.samples,
        staleness=dict(message.staleness),
        metrics=dict(message.metrics),
        eta_s=message.eta_s if message.HasField("eta_s") else None,
        waiting_for=message.waiting_for,
    )

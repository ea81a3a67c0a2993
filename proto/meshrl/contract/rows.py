"""Rows as the queue stores them: a Trajectory as columns, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.routed_experts import RoutedExperts
from meshrl.contract.types import (
    CONVERSATION,
    DATA_SOURCE,
    MEDIA,
    PARTS,
    REFERENCE_TOP,
    REWARD_INPUTS,
    REWARD_TIMES,
    ROLLOUT_TIMES,
    ROUTED_EXPERTS,
    ROW_MEDIA,
    TOKEN_REWARDS,
    Columns,
    Float32,
    Int32,
    Json,
    Media,
    Message,
    Outcome,
    PostedReward,
    RowFacts,
    RowPart,
    RowWrite,
    Sample,
    Score,
    Trajectory,
    Uid,
    Uint8,
    Version,
    VersionSpan,
    name_fault,
)


def text_column(text: str) -> Uint8:
    """UTF-8 bytes as uint8[n]."""
    return np.frombuffer(text.encode(), dtype=np.uint8)


def column_text(column: npt.NDArray[np.uint8]) -> str:
    """The inverse of `text_column`."""
    return column.tobytes().decode()


def rollout_write(
    trajectory: Trajectory,
    outcome: Outcome,
    finish_reason: str,
    now: Version,
    prompt: Int32 | None = None,
) -> RowWrite:
    """The rollout stage's write of one row; `now` is the version of a row without sampled tokens.

    `prompt` int32[p] is the task's; the row may begin with it, as its siblings do.
    """
    spans = trajectory.spans
    columns: Columns = {
        "tokens": trajectory.tokens,
        "loss_mask": trajectory.loss_mask,
        "rollout_logprobs": trajectory.rollout_logprobs,
        "spans": np.array(
            [(s.version.epoch, s.version.step, s.start, s.end) for s in spans], dtype=np.int64
        ).reshape(-1, 4),
        "response_text": text_column(trajectory.response_text),
        "replica": text_column(trajectory.replica),
    }
    if trajectory.routed_experts is not None:
        columns = {**columns, ROUTED_EXPERTS: trajectory.routed_experts.column}
    facts = RowFacts(
        outcome=outcome,
        num_tokens=len(trajectory.tokens),
        # By step, as staleness is counted: after a trainer went back to a checkpoint, tokens of (1, 3) may be
        # followed by tokens of (2, 0), and these are the older ones.
        oldest=min((s.version for s in spans), key=lambda v: (v.step, v.epoch), default=now),
        newest=max((s.version for s in spans), default=now),
        finish_reason=finish_reason,
        prompt_tokens=_begins_with(trajectory.tokens, prompt),
    )
    return RowWrite(uid=trajectory.uid, columns=columns, facts=facts)


def _begins_with(tokens: Int32, prompt: Int32 | None) -> int:
    """Tokens of the prompt that the row begins with: all or none."""
    if prompt is None or not np.array_equal(tokens[: len(prompt)], prompt):
        return 0
    return len(prompt)


def reward_write(score: Score, *, loss_mask: Uint8 | None = None) -> RowWrite:
    """The reward stage's write of one row; with its `loss_mask`, uint8[T], also the reward of each token.

    Raises:
        UserError: the judge gave another number of token rewards than the response has tokens, or a component a
            name that is none.
    """
    for name in (*score.components, *score.texts):
        if fault := name_fault(name):
            raise UserError(
                f"row {score.uid}: reward component {name[:80]!r}: {fault}", uid=score.uid
            )
    columns: Columns = {
        "reward": np.array([score.score], dtype=np.float32),
        # Texts are among the numbers: an older store has no column of their own.
        "reward_components": text_column(
            json.dumps({**score.texts, **score.components}, sort_keys=True)
        ),
        "reward_hash": text_column(score.reward_hash),
    }
    if loss_mask is not None:
        columns = {**columns, TOKEN_REWARDS: _token_rewards(score, loss_mask)}
    return RowWrite(uid=score.uid, columns=columns)


def _token_rewards(score: Score, loss_mask: Uint8) -> Float32:
    """float32[T]: the judge's, from the first sampled token on; where it gives none, the score at the last one."""
    rewards = np.zeros(len(loss_mask), dtype=np.float32)
    sampled = np.flatnonzero(loss_mask)
    if score.token_rewards is None:
        if len(rewards):
            rewards[sampled[-1] if len(sampled) else -1] = score.score
        return rewards
    first = int(sampled[0]) if len(sampled) else len(rewards)
    given, length = len(score.token_rewards), len(rewards) - first
    if given != length:
        problem = f"{given} token_rewards for a response of {length} tokens"
        raise UserError(f"row {score.uid}: {problem}", uid=score.uid)
    rewards[first:] = score.token_rewards
    return rewards


def posted_column(reward: PostedReward | None) -> Uint8:
    """A posted reward as JSON in uint8[n]; none is empty."""
    return text_column("" if reward is None else json.dumps(reward.to_json(), sort_keys=True))


def column_posted(column: npt.NDArray[np.uint8]) -> PostedReward | None:
    """The inverse of `posted_column`."""
    if not len(column):
        return None
    found = json.loads(column_text(column))
    return PostedReward(score=found["score"], components=found["components"])


def parts_column(parts: Sequence[RowPart]) -> Uint8:
    """Parts as JSON in uint8[n]."""
    seats = [[part.seat] if part.seat else [] for part in parts]
    written = [[p.start, list(p.anchors), *seat] for p, seat in zip(parts, seats, strict=True)]
    return text_column(json.dumps(written))


def column_parts(uid: Uid, column: npt.NDArray[np.uint8], tokens: int) -> tuple[RowPart, ...]:
    """The inverse of `parts_column`. Raises CorruptError."""
    try:
        found = [
            RowPart(start=int(start), anchors=tuple(map(str, anchors)), seat="".join(seat))
            for start, anchors, *seat in json.loads(column_text(column))
        ]
    except (ValueError, TypeError) as error:
        raise CorruptError(f"row {uid}: column {PARTS} is malformed: {error}") from error
    starts = [part.start for part in found]
    if not starts or starts[0] != 0 or sorted(set(starts)) != starts or starts[-1] >= tokens:
        raise CorruptError(f"row {uid}: parts begin at {starts[:8]}, of {tokens} tokens")
    return tuple(found)


def reward_inputs(sample: Sample) -> Uint8:
    """A judge's inputs beside the response, as JSON in uint8[n], for `sample_again`."""
    messages = [[m.role, m.content] for m in sample.messages]
    fields = [sample.data_source, sample.ground_truth, dict(sample.extra_info), messages]
    return text_column(json.dumps(fields))


def sample_again(uid: Uid, columns: Columns) -> Sample:
    """The sample that the judge scored, rebuilt from the row's columns `response_text` and `reward_inputs`."""
    data_source, ground_truth, extra_info, *rest = json.loads(column_text(columns[REWARD_INPUTS]))
    return Sample(
        uid=uid,
        data_source=data_source,
        solution=column_text(columns["response_text"]),
        ground_truth=ground_truth,
        extra_info=extra_info,
        messages=tuple(Message(role=role, content=content) for role, content in chain(*rest)),
    )


def own_media(media: Sequence[Media], task: Sequence[Media]) -> list[Media]:
    """The pictures of a row whose task has those of `task`, each picture's data once at most."""
    known = {each.sha256 for each in task}
    found: list[Media] = []
    for each in media:
        found.append(replace(each, data=b"") if each.sha256 in known else each)
        known.add(each.sha256)
    return found


def row_media_column(media: Sequence[Media], task: Sequence[Media]) -> Uint8:
    """The column of `own_media`, uint8[n]."""
    return codec.pack_media(own_media(media, task))


def with_media(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """Rows that were fetched together, each with its own pictures, or those that the first row of its group brought.

    Raises:
        CorruptError: a row names a picture that neither it nor its task has.
    """
    media_of = {row.uid.task: row.media for row in rows if row.media}
    if not media_of and all(row.row_media is None for row in rows):
        return list(rows)
    return [
        replace(row, media=media_of_row(row.uid, row.row_media, media_of.get(row.uid.task, ())))
        for row in rows
    ]


def media_of_row(
    uid: Uid, own: tuple[Media, ...] | None, task: tuple[Media, ...]
) -> tuple[Media, ...]:
    """The pictures of a row that has `own`, or those of its task. Raises CorruptError."""
    named = task if own is None else own
    known = {each.sha256: each for each in (*task, *named) if each.data}
    for each in named:
        if each.sha256 not in known:
            raise CorruptError(f"row {uid}: its picture {each.sha256[:12]} is not there")
    return tuple(known[each.sha256] for each in named)


def row_media(columns: Columns) -> tuple[Media, ...] | None:
    """A row's own pictures, some of them only named. Raises CorruptError."""
    return codec.unpack_media(columns[ROW_MEDIA], names=True) if ROW_MEDIA in columns else None


def trajectory(uid: Uid, columns: Columns) -> Trajectory:
    """A row's columns as a Trajectory; absent columns stay at their defaults.

    Raises:
        CorruptError: the per-token columns differ in length.
    """
    tokens = columns["tokens"]
    for name in (
        "loss_mask",
        "rollout_logprobs",
        "ref_logprobs",
        TOKEN_REWARDS,
        *REFERENCE_TOP,
    ):
        if name in columns and len(columns[name]) != len(tokens):
            raise CorruptError(
                f"row {uid}: column {name} has {len(columns[name])} entries, tokens {len(tokens)}"
            )
    said = (
        json.loads(column_text(columns["reward_components"]))
        if "reward_components" in columns
        else {}
    )
    return Trajectory(
        uid=uid,
        tokens=tokens,
        loss_mask=columns["loss_mask"],
        rollout_logprobs=columns["rollout_logprobs"],
        spans=tuple(
            VersionSpan(version=Version(int(epoch), int(step)), start=int(start), end=int(end))
            for epoch, step, start, end in columns["spans"]
        ),
        response_text=column_text(columns["response_text"]) if "response_text" in columns else "",
        reward=float(columns["reward"][0]) if "reward" in columns else None,
        reward_components={name: n for name, n in said.items() if not isinstance(n, str)},
        reward_texts={name: text for name, text in said.items() if isinstance(text, str)},
        reward_hash=column_text(columns["reward_hash"]) if "reward_hash" in columns else "",
        token_rewards=columns.get(TOKEN_REWARDS),
        ref_logprobs=columns.get("ref_logprobs"),
        ref_top_ids=columns.get("ref_top_ids"),
        ref_top_logprobs=columns.get("ref_top_logprobs"),
        rollout_times=_times(columns.get(ROLLOUT_TIMES)),
        reward_times=_times(columns.get(REWARD_TIMES)),
        conversation=tuple(json.loads(column_text(columns[CONVERSATION])))
        if CONVERSATION in columns
        else (),
        data_source=column_text(columns[DATA_SOURCE]) if DATA_SOURCE in columns else "",
        parts=column_parts(uid, columns[PARTS], len(tokens)) if PARTS in columns else (),
        routed_experts=_experts(uid, columns[ROUTED_EXPERTS], len(tokens))
        if ROUTED_EXPERTS in columns
        else None,
        media=codec.unpack_media(columns[MEDIA]) if MEDIA in columns else (),
        row_media=row_media(columns),
        replica=column_text(columns["replica"]) if "replica" in columns else "",
    )


DAMAGED = "damaged in the store"
"""The beginning of the reason of a row whose payload cannot be read any more."""
UNTRAINABLE = "cannot be trained on"
"""How the reason of a row begins that came as it was written, and that no step can be computed from."""
FAILED = "its step failed"
"""How the reason of a group's rows begins that was alone in a batch whose step failed, as its trainer says."""


def _experts(uid: Uid, column: Uint8, tokens: int) -> RoutedExperts:
    try:
        return RoutedExperts.of(column, tokens)
    except CorruptError as error:
        raise CorruptError(f"row {uid}: {error}") from error


def times_column(began: float, ended: float) -> npt.NDArray[np.float64]:
    """float64[2], for `rollout_times` and `reward_times`."""
    return np.array([began, ended])


def _times(column: npt.NDArray[Any] | None) -> tuple[float, float] | None:
    return None if column is None or len(column) != 2 else (float(column[0]), float(column[1]))


def conversation_column(messages: Sequence[Mapping[str, Any]]) -> Uint8:
    """Messages in the form of OpenAI's API, as JSON in uint8[n]: texts, and names and arguments of tool calls."""
    return text_column(json.dumps([_message(message) for message in messages]))


def _message(message: Mapping[str, Any]) -> dict[str, Json]:
    content = message.get("content") or ""
    kept: dict[str, Json] = {
        "role": str(message.get("role", "")),
        "content": content if isinstance(content, str) else json.dumps(content),
    }
    if message.get("name"):
        kept["name"] = str(message["name"])
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    if calls:
        kept["tool_calls"] = [
            {"name": str(call.get("name", "")), "arguments": _arguments(call.get("arguments"))}
            for call in calls
        ]
    return kept


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given)

"""Strategies that draw the contract's types, and what a round trip through the codec is."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshrl.contract import codec
from meshrl.contract.codec.control import DTYPES
from meshrl.contract.types import (
    GroupPolicy,
    Message,
    Outcome,
    RowBlock,
    RowFacts,
    RunSpec,
    SamplingParams,
    StageSpec,
    StalePolicy,
    Task,
    Uid,
    Version,
)

small = st.integers(0, 2**31 - 1)
large = st.integers(0, 2**63 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=12)
names = texts.filter(bool)
runs = names.map(lambda text: text.replace("/", "_"))
numbers = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
json_objects = st.dictionaries(st.text(max_size=8), json_values, max_size=3)
versions = st.builds(Version, large, large)
uids = st.builds(Uid, runs, names, small, small)
ids = hnp.arrays(np.int32, st.integers(0, 20))
arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
facts = st.builds(
    RowFacts,
    outcome=st.sampled_from(Outcome),
    num_tokens=large,
    oldest=versions,
    newest=versions,
    finish_reason=texts,
    prompt_tokens=large,
)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 1000),
    max_tokens=st.integers(1, 2**31 - 1),
    stop=st.lists(texts, max_size=3).map(tuple),
    stop_token_ids=st.lists(small, max_size=3).map(tuple),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 2),
    logit_bias=st.dictionaries(small, st.floats(-100, 100), max_size=3),
)
tasks = st.builds(
    Task,
    run=runs,
    task_id=names,
    prompt_ids=ids,
    messages=st.lists(st.builds(Message, role=texts, content=texts), max_size=2).map(tuple),
    data_source=texts,
    ground_truth=json_values,
    extra_info=json_objects,
    program=texts,
    sampling=sampling,
    group_size=st.integers(1, 64),
    deadline_s=numbers,
    priority=st.integers(-5, 5),
)
stages = st.builds(
    StageSpec,
    name=texts,
    reads=st.lists(texts, max_size=3).map(tuple),
    writes=st.lists(texts, max_size=3).map(tuple),
)
specs = st.builds(
    RunSpec,
    run=texts,
    group_size=small,
    batch_groups=small,
    max_staleness=st.just(math.inf) | st.integers(0, 9).map(float),
    stages=st.lists(stages, max_size=3).map(tuple),
    group_policy=st.sampled_from(GroupPolicy),
    group_k=small,
    stale_policy=st.sampled_from(StalePolicy),
    max_attempts=small,
    lease_ttl_s=numbers,
    resident_batches=small,
    resident_bytes=large,
    sampler=texts,
    gated=st.booleans(),
    priority=st.integers(-5, 5),
)
counts = st.dictionaries(texts, large, max_size=3)


@st.composite
def batch_groups(draw: st.DrawFn) -> RowBlock:
    rows = draw(st.integers(0, 3))

    def of_rows(values: st.SearchStrategy[Any]) -> Any:
        return draw(st.lists(values, min_size=rows, max_size=rows).map(tuple))

    manifest_facts = st.builds(
        RowFacts, st.sampled_from(Outcome), large, versions, versions, st.just(""), large
    )
    return RowBlock(
        task=draw(names),
        indices=of_rows(small),
        attempts=of_rows(small),
        group_size=draw(small),
        facts=of_rows(manifest_facts),
    )


measures = st.dictionaries(texts, numbers, max_size=3)


def same(left: Any, right: Any) -> bool:
    """Equality of values that contain arrays: dtype, shape and bits."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and all(
            same(getattr(left, field.name), getattr(right, field.name))
            for field in fields(left)
            if field.compare
        )
    return bool(left == right)


def over_the_network(message: Any) -> Any:
    """The message as the other side parses it."""
    if isinstance(message, list):
        return [over_the_network(one) for one in message]
    if isinstance(message, codec.Bulk):
        return codec.parser(type(message.message))(message.SerializeToString())
    return type(message).FromString(message.SerializeToString())


def round_trip(name: str, value: Any) -> None:
    """Encode and decode with the codec of that name: `codec.TASK` for task."""
    both: codec.Codec[Any, Any] = getattr(codec, name.upper())
    assert same(value, both.decode(over_the_network(both.encode(value))))

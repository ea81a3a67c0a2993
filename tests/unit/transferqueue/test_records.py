"""Stored records are read back as they were."""

from __future__ import annotations

import pytest
from orjson import Fragment

from meshrl.contract.errors import CorruptError
from meshrl.transferqueue.store import decode_record, encode_record, to_json


@pytest.mark.parametrize("value", [[1, "x", None, {"a": [0.5]}], "lone \ud83d surrogate", 2**70])
def test_a_record_comes_back_and_a_broken_one_is_named(value: object) -> None:
    stored = encode_record(value)
    assert decode_record(stored, "record") == value
    with pytest.raises(CorruptError, match="record 5"):
        decode_record(stored[:-1], "record 5")


@pytest.mark.parametrize("beside", ["plain", "lone \ud83d surrogate", 2**70])
@pytest.mark.parametrize("part", [[1, {"a": None}], "lone \ud83d surrogate", 2**70])
def test_a_part_that_is_encoded_already_is_written_as_it_is(part: object, beside: object) -> None:
    encoded = Fragment(to_json(part))
    for _ in range(2):
        stored = encode_record([encoded, beside])
        assert decode_record(stored, "record") == [part, beside]

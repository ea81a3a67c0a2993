"""Records at rest come back as they were."""

from __future__ import annotations

import pytest

from meshrl.contract.errors import CorruptError
from meshrl.transferqueue.sealed import Encoded, seal_json, unseal_json


@pytest.mark.parametrize("value", [[1, "x", None, {"a": [0.5]}], "lone \ud83d surrogate", 2**70])
def test_a_record_comes_back_and_a_broken_one_is_named(value: object) -> None:
    stored = seal_json(value)
    assert unseal_json(stored, "record") == value
    with pytest.raises(CorruptError, match="record 5"):
        unseal_json(stored[:-1], "record 5")


@pytest.mark.parametrize("beside", ["plain", "lone \ud83d surrogate", 2**70])
def test_what_is_json_already_is_written_as_it_is(beside: object) -> None:
    stored = seal_json([Encoded(b'[1,{"a":null}]'), beside])
    assert unseal_json(stored, "record") == [[1, {"a": None}], beside]

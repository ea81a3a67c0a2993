"""A picture that comes again and again is hashed once, and another one by its name is found all the same."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from meshrl.contract import codec
from meshrl.contract.codec.types import KnownPictures
from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Media, Task


def test_each_picture_is_hashed_once_and_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Media.of(b"picture one of this test"), Media.of(b"picture two of this test")
    task = Task(run="r", task_id="t", prompt_ids=np.zeros(2, dtype=np.int32), media=(one, two))
    sent = codec.pack_task(task).data
    hashed = Mock(wraps=Media.of)
    monkeypatch.setattr(Media, "of", hashed)
    found = [codec.unpack_task(sent) for _ in range(5)]
    column = codec.unpack_media(codec.pack_media((two, one)))
    assert all(each.media == (one, two) for each in found) and column == (two, one)
    assert hashed.call_count == 2
    assert column[0] is found[0].media[1] is found[4].media[1]


def test_other_data_under_a_known_name_are_refused() -> None:
    one = Media.of(b"one")
    codec.unpack_media(codec.pack_media((one,)))
    with pytest.raises(CorruptError, match="has other data than its name says"):
        codec.unpack_media(codec.pack_media((replace(one, data=b"two"),)))
    assert codec.unpack_media(codec.pack_media((one,))) == (one,)


def test_a_picture_of_a_task_brings_its_data_along() -> None:
    named = replace(Media.of(b"elsewhere"), data=b"")
    task = Task(run="r", task_id="t", prompt_ids=np.zeros(2, dtype=np.int32), media=(named,))
    with pytest.raises(CorruptError, match="comes without its data"):
        codec.unpack_task(codec.TASK.encode(task).SerializeToString())
    assert codec.unpack_media(codec.pack_media((named,)), names=True) == (named,)


def test_what_is_remembered_is_bounded() -> None:
    known = KnownPictures(10)
    for number in range(9):
        media = Media.of(b"%d123" % number)
        assert known.named(replace(media)) == media
    assert sum(len(each.data) for each in known._known.values()) <= 10
    assert known.named(Media.of(b"x" * 99)) == Media.of(b"x" * 99)
    assert not known._known

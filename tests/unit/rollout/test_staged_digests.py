"""An inference server loads the bytes that the rollout process wrote of a version: both make the same digests."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.common.chunk_digest import CHUNK_WORDS, digest
from meshrl.contract.types import TensorSpec, Version, WeightManifest
from meshrl.rollout.engines.vllm import PLUGIN_DIR
from meshrl.rollout.server_engine.checkpoint import write_version

CHUNK = 8 * CHUNK_WORDS


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server's side, imported as a server does."""
    monkeypatch.syspath_prepend(PLUGIN_DIR)
    return importlib.import_module("meshrl_staged")


def random_bytes(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 2, 8, 14, CHUNK - 2, CHUNK, CHUNK + 6, 16 * CHUNK + 10])
def test_both_sides_make_the_same_digest_wherever_the_bytes_lie(staged: Any, nbytes: int) -> None:
    data = random_bytes(nbytes + 2)
    for start in (0, 2):
        there = torch.from_numpy(data)[start : start + nbytes]
        assert staged.digest(there) == digest(data[start : start + nbytes])
    if nbytes and nbytes % 2 == 0:
        halves = torch.from_numpy(data[:nbytes].copy()).view(torch.bfloat16)
        assert staged.digest(halves) == digest(data[:nbytes])


def test_slabs_do_not_show_in_the_digest(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(5 * CHUNK + 6)
    whole = staged.digest(torch.from_numpy(data))
    monkeypatch.setattr(staged, "SLAB_WORDS", {})  # as on another device
    assert staged.digest(torch.from_numpy(data)) == whole == digest(data)


def test_every_changed_byte_and_every_exchange_of_words_or_chunks_shows() -> None:
    data = random_bytes(2 * CHUNK + 4)
    right = digest(data)
    for at in (0, 7, CHUNK - 1, CHUNK, 2 * CHUNK + 3):
        for bit in range(8):
            data[at] ^= 1 << bit
            assert digest(data) != right
            data[at] ^= 1 << bit
    words = data[: 2 * CHUNK].view(np.uint64)
    for one, other in ((0, 1), (5, CHUNK_WORDS), (CHUNK_WORDS - 1, 2 * CHUNK_WORDS - 1)):
        words[[one, other]] = words[[other, one]]
        assert digest(data) != right
        words[[one, other]] = words[[other, one]]
    # Signs of two values of one tensor: an even number of highest bits.
    data[3] ^= 0x80
    data[7] ^= 0x80
    assert digest(data) != right
    assert digest(data[:-1]) != digest(np.append(data[:-1], np.uint8(0)))


def written(directory: Path) -> dict[str, torch.Tensor]:
    """A version of three tensors in two buckets, one of them where eight bytes do not fit."""
    shapes = {"a": (3,), "b": (4, 5), "c": (2, 2)}
    buckets = [random_bytes(46), random_bytes(8)]
    places = {"a": (0, 0), "b": (0, 6), "c": (1, 0)}
    specs = tuple(
        TensorSpec(
            name=name,
            dtype="bfloat16",
            shape=shape,
            bucket=places[name][0],
            offset=places[name][1],
            nbytes=2 * int(np.prod(shape)),
        )
        for name, shape in shapes.items()
    )
    manifest = WeightManifest(
        run="r",
        version=Version(1, 0),
        tensors=specs,
        bucket_bytes=tuple(len(bucket) for bucket in buckets),
        bucket_hashes=("", ""),
    )
    write_version(directory, manifest, buckets, tied=False)
    return {
        spec.name: torch.from_numpy(
            buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes].copy()
        ).view(torch.bfloat16)
        for spec in specs
    }


def test_a_loader_gets_what_was_staged_and_refuses_anything_else(
    staged: Any, tmp_path: Path
) -> None:
    tensors = written(tmp_path)
    found = dict(staged.tensors(tmp_path))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name].view(-1).view(torch.int16), tensor.view(torch.int16))
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: c is not what was staged"):
        list(staged.tensors(tmp_path))


def test_of_several_ranks_each_verifies_its_share_and_all_of_them_everything(
    staged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    seen: list[int] = []
    real = staged.digest
    monkeypatch.setattr(
        staged, "digest", lambda tensor: seen.append(tensor.numel()) or real(tensor)
    )
    for rank in range(2):
        monkeypatch.setattr(staged, "_rank", lambda rank=rank: (rank, 2))
        assert len(list(staged.tensors(tmp_path))) == 3
    assert sorted(seen) == [3, 4, 20]

"""Reads a staged version inside an inference server, and verifies what the model is given.

This file runs inside the server's own environment, where meshrl is not installed: it imports torch, safetensors and
its neighbour `meshrl_lent` only. The rollout process wrote a digest of each tensor into the file, made of bytes that
it had verified; here it is computed again, by the same operations on a CPU and on a GPU, over the memory that the
model's loader reads. A version that arrived in this process's own memory has a digest of each bucket.

A digest is made of chunks of 32,768 64-bit words w: sum of (w ^ (w >> 32)) * K[i] modulo 2^64, K[i] odd and fixed.
Any single word that differs changes it, and so do two that changed places. It finds errors; it is no signature.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from meshrl_lent import LentMemory, memory
from safetensors import safe_open

CHUNK_WORDS = 32768
SLAB_WORDS = {"cpu": 2 * CHUNK_WORDS}
"""Worked on at once: what fits into a processor's cache, and 64 MiB elsewhere."""
ASKED, ANSWER, ARRIVED = "lend.json", "lent.json", "arrived.json"
"""See `meshrl.rollout.server_engine.staging`."""
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
KEY = "meshrl.digests"
"""Key of the file's metadata: JSON, from a tensor's name to its digest."""
_lent: LentMemory | None = None
"""Memory of this process's device that receives versions."""


def tensors(
    directory: Path, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a version, of Hugging Face names: views into the page cache, or into memory of the device.

    Of several ranks each verifies its share, on `device`: what lies in the page cache is the same for all.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: a tensor is not the one that was staged.
    """
    if (directory / ARRIVED).is_file():
        yield from _arrived(directory)
        return
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {directory}")
    rank, ranks = _rank()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            staged = json.loads((opened.metadata() or {}).get(KEY, "{}"))
            for index, name in enumerate(opened.keys()):
                tensor = opened.get_tensor(name)
                if name in staged and index % ranks == rank:
                    tensor = tensor.to(device)
                    if digest(tensor) != staged[name]:
                        raise ValueError(f"{file}: {name} is not what was staged")
                yield name, tensor


def _arrived(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the memory that `lend` made; all of it is verified before the first is yielded."""
    if _lent is None:
        raise ValueError(f"{directory}: this server has lent no memory")
    about = json.loads((directory / ARRIVED).read_text())
    for index, (bucket, wanted) in enumerate(zip(_lent.buckets, about["digests"], strict=True)):
        if digest(bucket) != wanted:
            raise ValueError(f"{directory}: bucket {index} is not what arrived")
    for name, dtype, shape, index, offset, nbytes in about["tensors"]:
        tensor = _lent.buckets[index][offset : offset + nbytes]
        tensor = tensor.clone() if offset % DTYPES[dtype].itemsize else tensor
        yield name, tensor.view(DTYPES[dtype]).view(shape)


def lend(directory: Path, device: torch.device) -> None:
    """After a version has been loaded from a file: have memory for the next one, if ASKED there says so.

    ANSWER there has the handles, or why there is none.
    """
    global _lent
    if device.type != "cpu":  # who writes into the memory waits for no stream of ours
        torch.accelerator.synchronize()
    rank, ranks = _rank()
    if rank or not (directory / ASKED).is_file():
        return
    asked = json.loads((directory / ASKED).read_text())
    try:
        if _lent is not None:
            _lent.free()
            _lent = None
        if ranks > 1:
            raise OSError(f"a receiver writes to one GPU, and the engine has {ranks}")
        if asked["sizes"]:
            free = memory(asked["memory"], device).free()
            if free < asked["needs"]:
                needs = f"a second version takes {asked['needs'] / 2**30:.1f} GiB"
                raise OSError(f"{needs}, {free / 2**30:.1f} GiB are free")
            _lent = LentMemory(asked["memory"], asked["sizes"], device)
        answer = {"gpu": _lent.gpu, "handles": _lent.handles} if _lent is not None else {}
    except OSError as error:
        answer = {"error": str(error)}
    with contextlib.suppress(OSError):  # of another user: then nothing is lent
        (directory / ANSWER).write_text(json.dumps(answer))


def digest(tensor: torch.Tensor) -> str:
    """Digest of the tensor's bytes, 16 hexadecimal digits; the same on every device."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    last = torch.zeros(8, dtype=torch.uint8, device=data.device)
    last[: data.numel() - whole] = data[whole:]
    words = data[:whole].view(torch.int64)
    slab = SLAB_WORDS.get(data.device.type, 256 * CHUNK_WORDS)
    parts = [words[at : at + slab] for at in range(0, words.numel(), slab)]
    if data.numel() > whole:  # the last word is at its own place in its chunk
        head = parts.pop() if parts and parts[-1].numel() < slab else words[:0]
        parts.append(torch.cat((head, last.view(torch.int64))))
    sums = [_chunks(part).cpu() for part in parts]
    chunks = torch.cat(sums).tolist() if sums else []
    found = hashlib.blake2b(data.numel().to_bytes(8, "little"), digest_size=8)
    for chunk in chunks:
        found.update((chunk % (1 << 64)).to_bytes(8, "little"))
    return found.hexdigest()


def _chunks(words: torch.Tensor) -> torch.Tensor:
    """int64[chunks], of int64[words]; int64 wraps around as uint64 does."""
    mixed = (words >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(words)
    rest = -mixed.numel() % CHUNK_WORDS
    if rest:
        mixed = torch.nn.functional.pad(mixed, (0, rest))
    return mixed.view(-1, CHUNK_WORDS).mul_(_factors(words.device)).sum(dim=1)


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """int64[CHUNK_WORDS]: K, the odd neighbours of SplitMix64's sequence (Steele et al., 2014)."""
    most = (1 << 64) - 1
    factors = []
    for index in range(1, CHUNK_WORDS + 1):
        z = index * 0x9E3779B97F4A7C15 & most
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & most
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & most
        z = (z ^ (z >> 31)) | 1
        factors.append(z - (1 << 64) if z >> 63 else z)
    return torch.tensor(factors, dtype=torch.int64, device=device)


def _rank() -> tuple[int, int]:
    """This worker among those of its engine."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1

"""A version that is proposed while the trainer still gathers it: its plan is known, its bytes and hashes are not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from meshrl.common.chunk_digest import digest
from meshrl.contract.errors import CorruptError
from meshrl.contract.ports import GatheredSource, WeightSource
from meshrl.weights.messages import hashes_of


class SourceError(CorruptError):
    """The source's bytes differ from its manifest, or never came: the replicas are not the cause."""


async def gathered(source: WeightSource, index: int) -> tuple[str, Sequence[int]]:
    """Return once a bucket is there, with its hash and those of its tensors. Raises SourceError."""
    if not isinstance(source, GatheredSource):
        return hashes_of(source.manifest)[index]
    try:
        return await source.gathered(index)
    except Exception as error:
        raise SourceError(
            f"weights {source.manifest.version} were not gathered: {error}"
        ) from error


def is_whole(source: WeightSource) -> bool:
    """Whether all buckets are there: then the manifest has their hashes."""
    return bool(source.manifest.bucket_hashes)


_digests: WeakKeyDictionary[WeightSource, dict[int, asyncio.Future[str]]] = WeakKeyDictionary()


async def chunk_digest(source: WeightSource, index: int) -> str:
    """Of a bucket that is there; made once, when the first replica that receives on a device asks."""
    made = _digests.setdefault(source, {})
    if index not in made:
        made[index] = asyncio.ensure_future(asyncio.to_thread(digest, source.bucket(index)))
    return await asyncio.shield(made[index])


async def whole(source: WeightSource) -> None:
    """Return once all buckets are there. Raises SourceError."""
    for index in range(len(source.manifest.bucket_bytes)):
        await gathered(source, index)

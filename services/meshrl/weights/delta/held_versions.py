"""The buckets that a replica has received, and those that its engine was committed to: the base of the next patch."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshrl.contract.types import Uint8, Version, WeightManifest


@dataclass(slots=True)
class _Buckets:
    manifest: WeightManifest
    by_index: dict[int, Uint8] = field(default_factory=dict)


class Held:
    """The buckets of the committed version, and of the one that arrives. Arrays are kept, not copied.

    An engine may hold the same arrays. Should it ever write to them, the next patch gives other bytes than the
    manifest's, which the coordinator notices, and the bucket is sent whole.
    """

    def __init__(self) -> None:
        self._committed: _Buckets | None = None
        self._arriving: _Buckets | None = None

    def base(self, manifest: WeightManifest, index: int) -> tuple[Version, Uint8] | None:
        """The committed version and its bucket, if it is a base for a bucket of `manifest`."""
        held = self._committed
        if held is None or held.manifest.run != manifest.run:
            return None
        bucket = held.by_index.get(index)
        if bucket is None or bucket.nbytes != manifest.bucket_bytes[index]:
            return None
        return held.manifest.version, bucket

    def arrived(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Keep a bucket of a version that is not committed yet; its hash has not been checked here."""
        if self._arriving is None or self._arriving.manifest.version != manifest.version:
            self._arriving = _Buckets(manifest)
        self._arriving.by_index[index] = bucket

    def commit(self, version: Version) -> None:
        """The engine serves `version`: the new base, if all of it arrived here."""
        arriving = self._arriving
        if arriving is None or arriving.manifest.version != version:
            return
        self._arriving = None
        if len(arriving.by_index) == len(arriving.manifest.bucket_bytes):
            self._committed = arriving

    def forget(self) -> None:
        """A patched bucket was wrong: use no patches until a whole version is committed."""
        self._committed = None

"""A batch that a trainer has taken: its record, and which groups it has."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshrl.contract.types import Json
from meshrl.transferqueue.store import encode_record


@dataclass(slots=True, eq=False)
class TakenBatch:
    """Groups that a trainer holds, or that are in an optimizer step that no checkpoint covers yet."""

    run_number: int
    number: int
    batch_id: str
    step: int
    epoch: int
    settled: bool = False
    consumed: bool = False
    """Its groups hold no admission credit any more; derived, not stored (see operations/admission.py)."""
    groups: list[int] = field(default_factory=list)
    """Numbers of the groups that `filter` left in it; stored with the groups."""

    @property
    def key(self) -> bytes:
        """The key of the record."""
        return b"b" + self._suffix

    @property
    def manifest_key(self) -> bytes:
        """The key of the manifest: what `take` answered, for a caller that asks again."""
        return b"m" + self._suffix

    @property
    def _suffix(self) -> bytes:
        return self.run_number.to_bytes(4, "big") + self.number.to_bytes(8, "big")

    def encode(self) -> bytes:
        """The record."""
        return encode_record([self.number, self.batch_id, self.step, self.epoch, self.settled])

    @classmethod
    def restored(cls, run_number: int, stored: Json) -> TakenBatch:
        """The inverse of `encode`, without groups."""
        number, batch_id, step, epoch, settled = stored
        return cls(run_number, number, batch_id, step, epoch, settled)

"""The row-level methods of the queue, by means of those that move whole groups: every queue and client has both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from meshrl.contract.precision import Precision, with_rounded_logprobs
from meshrl.contract.types import (
    Columns,
    GroupRows,
    PackedGroup,
    PayloadGroup,
    RowWrite,
    Uid,
    group_rows,
    packed_groups,
)


class RowMethods(ABC):
    """`write` and `fetch` of the Queue port for whoever has `write_packed` and `fetch_packed`."""

    logprob_precision: Precision = "fp32"
    """What `write` rounds log-probs to; rows that come packed are left as they are."""

    @abstractmethod
    async def write_packed(self, run: str, stage: str, groups: Sequence[PackedGroup]) -> None:
        """See Queue."""

    @abstractmethod
    async def fetch_packed(
        self, run: str, groups: Sequence[GroupRows], columns: Sequence[str]
    ) -> Sequence[PayloadGroup]:
        """See Queue."""

    async def write(
        self, run: str, stage: str, token_of: Mapping[Uid, int], rows: Sequence[RowWrite]
    ) -> None:
        """See Queue."""
        if self.logprob_precision != "fp32":
            rows = [with_rounded_logprobs(row, self.logprob_precision) for row in rows]
        await self.write_packed(run, stage, packed_groups(token_of, rows))

    async def fetch(
        self, run: str, uids: Sequence[Uid], columns: Sequence[str]
    ) -> Sequence[Columns]:
        """See Queue."""
        groups = await self.fetch_packed(run, group_rows(run, uids), columns)
        return [row for group in groups for row in group.columns()]

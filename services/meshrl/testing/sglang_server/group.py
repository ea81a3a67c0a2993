"""The fake's rank of a weight-update group, joined as SGLang joins: with gloo in NCCL's place. Imports torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

from meshrl.testing.sglang_server.scheduler import MARKS

TIMEOUT_S = 60.0
c10d: Any = torch.distributed
"""torch's stubs leave out the stores."""


class GlooRank:
    """Rank `rank_offset` of the group, as tensor-parallel rank 0 would be."""

    def __init__(self, body: dict[str, Any]) -> None:
        """The same private helper that SGLang uses: it decides under which prefixes ranks find each other.

        Raises torch's error if no rank answers.
        """
        timeout = timedelta(seconds=TIMEOUT_S)
        rank, size = body["rank_offset"], body["world_size"]
        where = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, size = next(rendezvous(where, rank, size, timeout=timeout))
        store.set_timeout(timeout)
        name = body["group_name"]
        self._group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            c10d.Backend(body["backend"]),
            c10d.PrefixStore(name, store),
            group_name=name,
            backend_options=None,
            timeout=timeout,
        )
        _world.pg_group_ranks[self._group] = {i: i for i in range(size)}
        self._mark: int | None = None

    def receive(self, body: dict[str, Any]) -> int:
        """One flattened bucket; the mark is that of the first bucket's first tensor.

        Raises:
            ValueError: a tensor begins where its dtype cannot, or the format is another.
        """
        if body.get("load_format") != "flattened_bucket":
            raise ValueError(
                f"this rank reads flattened_bucket only, got {body.get('load_format')}"
            )
        offset, views = 0, []
        for name, kind, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            dtype = getattr(torch, kind)
            if offset % dtype.itemsize:
                raise ValueError(
                    f"Unaligned received tensor {name}: byte offset {offset}, dtype {dtype}"
                )
            views.append((dtype, offset))
            offset += torch.Size(shape).numel() * dtype.itemsize
        if not views:
            raise ValueError("Cannot create empty tensor bucket")
        flat = torch.empty(offset, dtype=torch.uint8)
        torch.distributed.broadcast(flat, src=0, group=self._group)
        dtype, start = views[0]
        first = flat[start : start + dtype.itemsize].view(dtype)
        if self._mark is None:
            self._mark = int(first.abs().item()) % MARKS
        mark, self._mark = self._mark, None if body.get("weight_version") else self._mark
        return mark

    def close(self) -> None:
        """Leave the group."""
        torch.distributed.destroy_process_group(self._group)

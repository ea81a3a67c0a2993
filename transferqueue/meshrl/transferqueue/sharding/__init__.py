"""Several queue processes as one queue. This module is the package's only way in; README.md says when it pays.

ShardedQueue    the Queue port over several shards (router.py)
ShardQueue      a TransferQueue that can be one of them (shard.py)
Shard           the port between the two (port.py), and the figures that it answers with
"""

from meshrl.transferqueue.operations.window import Sampled
from meshrl.transferqueue.sharding.merge import total_ledger
from meshrl.transferqueue.sharding.port import (
    GroupCounts,
    RowCounts,
    Shard,
    ShardCapacity,
    ShardNote,
)
from meshrl.transferqueue.sharding.router import ShardedQueue
from meshrl.transferqueue.sharding.run_shards import check_alone
from meshrl.transferqueue.sharding.shard import ShardQueue
from meshrl.transferqueue.sharding.shard_list import SHARD_LIST

__all__ = [
    "SHARD_LIST",
    "GroupCounts",
    "RowCounts",
    "Sampled",
    "Shard",
    "ShardCapacity",
    "ShardNote",
    "ShardQueue",
    "ShardedQueue",
    "check_alone",
    "total_ledger",
]

"""Between contract types and protobuf messages: `encode_*` takes a type, `decode_*` a message or a list of them.

Whatever is wrong with a value or a message ends in a UserError that names the type, never in a TypeError from deep
inside. Decoded arrays are read-only.

    types       single values: versions, uids, tasks, arrays; what turns a mistake into a UserError
    rows        rows of several groups side by side, batches among them
    streams     what the queue streams: admitted tasks, leases, writes, fetched rows
    bulk        messages whose payload protobuf never touches; many small messages in a few larger ones
    compression frames in fewer bytes between hosts, without loss
    runs        the queue's control methods
    work        engine, judges, reference and trainer
"""

from meshrl.contract.codec.bulk import PAGE_BYTES, Bulk, pages, parser
from meshrl.contract.codec.rows import decode_batch, decode_rows, encode_batch, encode_rows
from meshrl.contract.codec.runs import (
    decode_dead_letter,
    decode_held_rows,
    decode_ledger,
    decode_run_spec,
    decode_run_state,
    decode_waiting,
    encode_dead_letter,
    encode_held_rows,
    encode_ledger,
    encode_run_spec,
    encode_run_state,
    encode_waiting,
)
from meshrl.contract.codec.streams import (
    AdmitCall,
    WriteCall,
    decode_admit,
    decode_fetched,
    decode_lease,
    decode_write,
    encode_admit,
    encode_fetched,
    encode_lease,
    encode_write,
)
from meshrl.contract.codec.types import (
    decode_array,
    decode_outcome,
    decode_task,
    decode_uid,
    decode_uids,
    decode_version,
    encode_array,
    encode_outcome,
    encode_task,
    encode_uid,
    encode_uids,
    encode_version,
    pack_media,
    pack_task,
    printable,
    unpack_media,
    unpack_task,
)
from meshrl.contract.codec.work import (
    decode_engine_stats,
    decode_sample,
    decode_score,
    decode_trainer_status,
    encode_engine_stats,
    encode_sample,
    encode_score,
    encode_trainer_status,
)

__all__ = [
    "PAGE_BYTES",
    "AdmitCall",
    "Bulk",
    "WriteCall",
    "decode_admit",
    "decode_array",
    "decode_batch",
    "decode_dead_letter",
    "decode_engine_stats",
    "decode_fetched",
    "decode_held_rows",
    "decode_lease",
    "decode_ledger",
    "decode_outcome",
    "decode_rows",
    "decode_run_spec",
    "decode_run_state",
    "decode_sample",
    "decode_score",
    "decode_task",
    "decode_trainer_status",
    "decode_uid",
    "decode_uids",
    "decode_version",
    "decode_waiting",
    "decode_write",
    "encode_admit",
    "encode_array",
    "encode_batch",
    "encode_dead_letter",
    "encode_engine_stats",
    "encode_fetched",
    "encode_held_rows",
    "encode_lease",
    "encode_ledger",
    "encode_outcome",
    "encode_rows",
    "encode_run_spec",
    "encode_run_state",
    "encode_sample",
    "encode_score",
    "encode_task",
    "encode_trainer_status",
    "encode_uid",
    "encode_uids",
    "encode_version",
    "encode_waiting",
    "encode_write",
    "pack_media",
    "pack_task",
    "pages",
    "parser",
    "printable",
    "unpack_media",
    "unpack_task",
]

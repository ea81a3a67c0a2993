"""Between contract types and protobuf messages.

Whatever is wrong with a value or a message ends in a UserError that names the type, never in a TypeError from deep
inside. Decoded arrays are read-only.

    control     control messages by reflection, and what turns a mistake into a UserError
    types       the types that travel so, with what does not follow from their fields; pictures, packed tasks
    rows        rows of several groups side by side, batches among them
    streams     what the queue streams: admitted tasks, leases, writes, fetched rows
    bulk        messages whose payload protobuf never touches; many small messages in a few larger ones
    compression frames in fewer bytes between hosts, without loss
"""

from meshrl.contract.codec.bulk import PAGE_BYTES, Bulk, pages, parser
from meshrl.contract.codec.control import (
    TEXT,
    Codec,
    EnumCodec,
    Field,
    codec_of,
    decode_array,
    encode_array,
    printable,
)
from meshrl.contract.codec.streams import (
    AdmitCall,
    WriteCall,
    decode_admit,
    decode_batch,
    decode_fetched,
    decode_lease,
    decode_rows,
    decode_write,
    encode_admit,
    encode_batch,
    encode_fetched,
    encode_lease,
    encode_rows,
    encode_write,
)
from meshrl.contract.codec.types import (
    DEAD_LETTER,
    ENGINE_STATS,
    LEDGER,
    OUTCOMES,
    RUN_SPEC,
    RUN_STATE,
    SAMPLE,
    SCORE,
    TASK,
    TRAINER_STATUS,
    UID,
    VERSION,
    WAITING,
    pack_media,
    pack_task,
    unpack_media,
    unpack_task,
)

__all__ = [
    "DEAD_LETTER",
    "ENGINE_STATS",
    "LEDGER",
    "OUTCOMES",
    "PAGE_BYTES",
    "RUN_SPEC",
    "RUN_STATE",
    "SAMPLE",
    "SCORE",
    "TASK",
    "TEXT",
    "TRAINER_STATUS",
    "UID",
    "VERSION",
    "WAITING",
    "AdmitCall",
    "Bulk",
    "Codec",
    "EnumCodec",
    "Field",
    "WriteCall",
    "codec_of",
    "decode_admit",
    "decode_array",
    "decode_batch",
    "decode_fetched",
    "decode_lease",
    "decode_rows",
    "decode_write",
    "encode_admit",
    "encode_array",
    "encode_batch",
    "encode_fetched",
    "encode_lease",
    "encode_rows",
    "encode_write",
    "pack_media",
    "pack_task",
    "pages",
    "parser",
    "printable",
    "unpack_media",
    "unpack_task",
]

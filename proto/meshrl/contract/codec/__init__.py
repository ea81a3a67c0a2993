"""Conversion between contract types and protobuf messages.

Whatever is wrong with a value or a message ends in a UserError that names the type, never in a TypeError from deep
inside. Decoded arrays are read-only.

    control     control messages by reflection, and what turns a mistake into a UserError
    types       the types that travel so, with what does not follow from their fields; pictures, packed tasks
    rows        rows of several groups side by side, batches among them
    streams     what the queue streams: admitted tasks, leases, writes, fetched rows
    bulk        messages whose payload protobuf never touches; many small messages in a few larger ones; frames in
                fewer bytes between hosts, without loss
"""

from meshrl.contract.codec.bulk import (
    PAGE_BYTES as PAGE_BYTES,
    Bulk as Bulk,
    pages as pages,
    parser as parser,
)
from meshrl.contract.codec.control import (
    TEXT as TEXT,
    Codec as Codec,
    EnumCodec as EnumCodec,
    Field as Field,
    codec_of as codec_of,
    decode_array as decode_array,
    encode_array as encode_array,
    printable as printable,
)
from meshrl.contract.codec.streams import (
    decode_admit as decode_admit,
    decode_batch as decode_batch,
    decode_fetched as decode_fetched,
    decode_lease as decode_lease,
    decode_rows as decode_rows,
    decode_write as decode_write,
    encode_admit as encode_admit,
    encode_batch as encode_batch,
    encode_fetched as encode_fetched,
    encode_lease as encode_lease,
    encode_rows as encode_rows,
    encode_write as encode_write,
)
from meshrl.contract.codec.types import (
    DEAD_LETTER as DEAD_LETTER,
    ENGINE_STATS as ENGINE_STATS,
    LEDGER as LEDGER,
    OUTCOMES as OUTCOMES,
    RUN_SPEC as RUN_SPEC,
    RUN_STATE as RUN_STATE,
    SAMPLE as SAMPLE,
    SCORE as SCORE,
    TASK as TASK,
    TRAINER_STATUS as TRAINER_STATUS,
    TRAINING_REQUEST as TRAINING_REQUEST,
    TRAINING_RESULT as TRAINING_RESULT,
    UID as UID,
    VERSION as VERSION,
    WAITING as WAITING,
    pack_media as pack_media,
    pack_task as pack_task,
    pack_training as pack_training,
    unpack_media as unpack_media,
    unpack_task as unpack_task,
    unpack_training_request as unpack_training_request,
    unpack_training_result as unpack_training_result,
)

"""Settings of every gRPC connection, for both ends: message sizes, keepalive, the longest wait of a call."""

from __future__ import annotations

from typing import Final, Protocol

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Limit of one message, in both directions. Bulk data goes in streams of much smaller messages."""
MAX_STREAM_BYTES: Final = 1 << 30
"""Limit of all messages of one streamed request, because the server holds it until it is complete."""
MAX_CALLS: Final = 16_384
"""Limit of calls that a server holds at once, waiting ones and streams included; each takes some 30 kB. 1,000 workers
of one address wait in 2,000 and may make 10,000 more."""
MAX_REQUEST_BYTES: Final = 2 << 30
"""Limit of all requests that a server holds at once."""
MAX_ANSWER_BYTES: Final = 512 << 20
"""Payload that a server has read for answers and not sent, in all calls of one role at once."""
MAX_CONNECTIONS: Final = 16_384
"""Limit of one server; a worker has two or three connections to its queue."""
MAX_METADATA_BYTES: Final = 64 << 10
"""Limit of metadata: an error with its details fits; gRPC's default of 8 KiB is less than a traceback."""
MAX_WAIT_S: Final = 60.0
"""The longest wait in the server, whatever a call asks for; the client calls again."""

_SIZES: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    # One page of payload in one HTTP/2 frame instead of sixty-four.
    ("grpc.http2.max_frame_size", 4 << 20),
)
# A host that lost its power or its network sends no FIN: after 20 s of silence it is pinged, 10 s later given up.
_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: Final = (
    *_SIZES,
    *_KEEPALIVE,
    # Reconnect soon: a service restarts within a second or two, and gRPC's default grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # One connection per client: a closed client leaves no connection behind that another client shares.
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS: Final = (
    *_SIZES,
    *_KEEPALIVE,
    # Without this a second server can start on a taken port, and the two share its calls at random.
    ("grpc.so_reuseport", 0),
    # By default a client may ping a silent connection every five minutes: the third ping too many closes it.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    # Who opens connections and says nothing may not keep others out. Clients connect again by themselves.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 900_000),
)


class SizedMessage(Protocol):
    """A protobuf message, or a message with its bulk data beside it (contract/codec/bulk.py)."""

    def ByteSize(self) -> int:
        """The serialized size in bytes."""
        ...

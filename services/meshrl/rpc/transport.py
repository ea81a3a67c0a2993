"""What both ends of every connection agree on: message sizes, keepalive, and how long one question may wait."""

from __future__ import annotations

from typing import Final, Protocol

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Of one message, either way. Bulk travels in streams of much smaller ones."""
MAX_STREAM_BYTES: Final = 1 << 30
"""Of all messages of one streamed request, because it is held until it is complete."""
MAX_METADATA_BYTES: Final = 64 << 10
"""Room for an error with its details; gRPC's default of 8 KiB is less than a traceback."""
MAX_WAIT_S: Final = 60.0
"""The server's patience: no question waits longer, whatever it asks for; the asker asks again."""

_SIZES: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    # A page in one HTTP/2 frame instead of sixty-four.
    ("grpc.http2.max_frame_size", 4 << 20),
)
# A peer that lost its power or its network sends no FIN: after 20 s of silence it is asked, after 10 s more given up.
_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: Final = (
    *_SIZES,
    *_KEEPALIVE,
    # Tried again soon: a service that restarts is back in a second or two, and gRPC's default grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # One wire, one connection: a closed wire leaves nothing behind that another one shares.
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS: Final = (
    *_SIZES,
    *_KEEPALIVE,
    # Without this a second server on a taken port starts, and the two share its calls at random.
    ("grpc.so_reuseport", 0),
    # The default answers a client's keepalive with "too_many_pings" and hangs up.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class Sized(Protocol):
    """A message, or one with its bulk beside it (contract/codec/bulk.py)."""

    def ByteSize(self) -> int:
        """On the wire."""
        ...

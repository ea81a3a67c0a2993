"""The carrier of `simulated_fleet` with one channel to all replicas instead of one to each."""

from .simulated_fleet import WireCarrier as Carrier

__all__ = ["Carrier"]
GROUPS = True
STREAMS = True

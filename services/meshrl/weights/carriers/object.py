"""The carrier `disk` under a second name, for stores that are slow and hold patches: it needs `weights.directory`."""

from meshrl.weights.carriers.disk import Carrier

__all__ = ["Carrier"]

REACH = "directory"
STREAMS = True

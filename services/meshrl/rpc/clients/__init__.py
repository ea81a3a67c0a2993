"""One client per port: the same Protocol as the object elsewhere, over gRPC."""

from meshrl.rpc.clients.peer import PERSON_PATIENCE_S, STAGE_PATIENCE_S
from meshrl.rpc.clients.queue import QueueWire
from meshrl.rpc.clients.reference import LogProbsWire
from meshrl.rpc.clients.reward import JudgeWire
from meshrl.rpc.clients.rollout import RolloutWire
from meshrl.rpc.clients.trainer import TrainerWire

__all__ = [
    "PERSON_PATIENCE_S",
    "STAGE_PATIENCE_S",
    "JudgeWire",
    "LogProbsWire",
    "QueueWire",
    "RolloutWire",
    "TrainerWire",
]

"""One client per port: the same Protocol as the object elsewhere, over gRPC."""

from meshrl.services.wires.peer import PERSON_PATIENCE_S, STAGE_PATIENCE_S
from meshrl.services.wires.queue import QueueWire
from meshrl.services.wires.reference import LogProbsWire
from meshrl.services.wires.reward import JudgeWire
from meshrl.services.wires.rollout import RolloutWire
from meshrl.services.wires.trainer import TrainerWire

__all__ = [
    "PERSON_PATIENCE_S",
    "STAGE_PATIENCE_S",
    "JudgeWire",
    "LogProbsWire",
    "QueueWire",
    "RolloutWire",
    "TrainerWire",
]

"""One client per port: the same Protocol as the object elsewhere, over gRPC."""

from meshrl.rpc.clients.peer import PERSON_PATIENCE_S, STAGE_PATIENCE_S
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.clients.reference import LogProbsClient
from meshrl.rpc.clients.reward import JudgeClient
from meshrl.rpc.clients.rollout import RolloutClient
from meshrl.rpc.clients.trainer import TrainerClient

__all__ = [
    "PERSON_PATIENCE_S",
    "STAGE_PATIENCE_S",
    "JudgeClient",
    "LogProbsClient",
    "QueueClient",
    "RolloutClient",
    "TrainerClient",
]

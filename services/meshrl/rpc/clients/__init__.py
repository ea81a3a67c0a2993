"""One gRPC client per port. A client implements the same Protocol as the remote object."""

from meshrl.rpc.clients.base import INTERACTIVE_RETRY_S, SERVICE_RETRY_S
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.clients.reward import JudgeClient
from meshrl.rpc.clients.rollout import RolloutClient
from meshrl.rpc.clients.trainer import TrainerClient

__all__ = [
    "INTERACTIVE_RETRY_S",
    "SERVICE_RETRY_S",
    "JudgeClient",
    "QueueClient",
    "RolloutClient",
    "TrainerClient",
]

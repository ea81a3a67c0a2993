"""One gRPC servicer per service. It translates and delegates; it has no state and no `try`."""

from meshrl.rpc.servicers.queue import QueueServicer
from meshrl.rpc.servicers.reward import RewardServicer
from meshrl.rpc.servicers.rollout import RolloutServicer
from meshrl.rpc.servicers.trainer import TrainerServicer

__all__ = [
    "QueueServicer",
    "RewardServicer",
    "RolloutServicer",
    "TrainerServicer",
]

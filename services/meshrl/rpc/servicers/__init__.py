"""One thin servicer per service: translates and delegates, no state, no `try`."""

from meshrl.rpc.servicers.queue import QueueDoor
from meshrl.rpc.servicers.reference import ReferenceDoor
from meshrl.rpc.servicers.reward import RewardDoor
from meshrl.rpc.servicers.rollout import RolloutDoor
from meshrl.rpc.servicers.trainer import TrainerDoor

__all__ = ["QueueDoor", "ReferenceDoor", "RewardDoor", "RolloutDoor", "TrainerDoor"]

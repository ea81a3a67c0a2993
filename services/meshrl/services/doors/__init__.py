"""One thin servicer per service: translates and delegates, no state, no `try`."""

from meshrl.services.doors.queue import QueueDoor
from meshrl.services.doors.reference import ReferenceDoor
from meshrl.services.doors.reward import RewardDoor
from meshrl.services.doors.rollout import RolloutDoor
from meshrl.services.doors.trainer import TrainerDoor

__all__ = ["QueueDoor", "ReferenceDoor", "RewardDoor", "RolloutDoor", "TrainerDoor"]

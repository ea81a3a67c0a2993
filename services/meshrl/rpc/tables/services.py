"""The methods of judges, trainer, engines and the weight plane."""

from __future__ import annotations

from meshrl.contract.types import EngineStats, TrainerStatus
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.methods import Table, bare_row, row, service
from meshrl.v1 import reward_pb2, rollout_pb2, trainer_pb2, weight_patches_pb2, weights_pb2

TRAINER, ROLLOUT, READER = MeshRole.TRAINER, MeshRole.ROLLOUT, MeshRole.READER


class RolloutTable(Table, service=service(rollout_pb2.DESCRIPTOR, "Rollout")):
    """meshrl.v1.Rollout."""

    @row("GetStats", TRAINER, READER)
    async def stats(self) -> EngineStats:
        """The engine's present statistics."""
        raise NotImplementedError


class RewardTable(Table, service=service(reward_pb2.DESCRIPTOR, "Reward")):
    """meshrl.v1.Reward."""

    by_hand = (
        bare_row("Score", TRAINER, ROLLOUT, READER),
        bare_row("GetInfo", TRAINER, ROLLOUT, READER),
    )


class TrainerTable(Table, service=service(trainer_pb2.DESCRIPTOR, "Trainer")):
    """meshrl.v1.Trainer."""

    by_hand = (bare_row("Watch", READER, waits=True),)

    @row("GetStatus", READER)
    async def status(self) -> TrainerStatus:
        """How training does now."""
        raise NotImplementedError


class WeightsTable(Table, service=service(weights_pb2.DESCRIPTOR, "Weights")):
    """meshrl.v1.Weights."""

    by_hand = (
        bare_row("Join", ROLLOUT, waits=True),
        bare_row("Fleet", READER),
        bare_row("Drain"),
    )


class WeightPatchesTable(Table, service=service(weight_patches_pb2.DESCRIPTOR, "WeightPatches")):
    """meshrl.v1.WeightPatches."""

    by_hand = (bare_row("Fetch", ROLLOUT, waits=True),)

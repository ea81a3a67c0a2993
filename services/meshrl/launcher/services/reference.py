"""The reference service: log-probs of a frozen model, for algorithms with a KL term."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrl.config.recipe import Recipe, needs_reference
from meshrl.config.stages import Columns, ServiceKind
from meshrl.contract.types import REFERENCE_STAGE

if TYPE_CHECKING:
    from meshrl.rpc.service_context import ServiceContext


def _columns(recipe: Recipe, evaluation: bool) -> Columns | None:
    # Evaluation has no KL term.
    if evaluation or not needs_reference(recipe):
        return None
    return Columns(reads=REFERENCE_STAGE.reads, writes=REFERENCE_STAGE.writes)


SERVICE = ServiceKind(sections=("model", "reference"), columns=_columns)


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Add reference log-probs to rows until stopped."""
    from meshrl.launcher.services import _reference

    await _reference.run(recipe, context)

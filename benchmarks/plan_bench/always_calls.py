"""A format in which every turn calls the tool `wait`, whatever the policy says: `plan_bench.always_calls`."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.rollout.tools.ports import ToolCall


def parse(text: str) -> Sequence[ToolCall]:
    """One call."""
    return [ToolCall(name="wait")]

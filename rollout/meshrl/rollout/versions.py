"""The version of an engine that has not committed any."""

from __future__ import annotations

from meshrl.contract.types import Version

UNSERVED = Version(0, 0)
"""A trainer's epochs begin at 1, so no published version is this one."""

"""Processes that tests start and kill."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def python(*words: object, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python WORDS` as a process of its own; killed at the end if it still runs. Options are asyncio's."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *map(str, words),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()

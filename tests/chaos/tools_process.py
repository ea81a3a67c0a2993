"""A rollout worker as a process whose policy calls an MCP server: `python -m … QUEUE LOG NAME`.

The policy is scripted: one call of `add_or_wait`, then an answer with what was observed. Runs until SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from meshrl.rollout.config import CheckpointIntervals, RowSchedule
from meshrl.rollout.programs import ProgramCache
from meshrl.rollout.worker import RolloutWorker
from meshrl.rpc.clients.queue import QueueClient
from tests.doubles.scripted import END, Scripted

from ..unit.rollout.chats import chat_tokenizer

RUN = "chaos"
LIGHT = Path(__file__).parents[1] / "integration" / "mcp_light.py"
CALL = f'<tool_call>{{"name": "add_or_wait", "arguments": {{"a": 20, "b": 22}}}}</tool_call>{END}'


def answer(prompt: str) -> str:
    observed = prompt.rpartition("<|start|>tool\n")[2].partition(END)[0]
    return f"It is {observed}.{END}"


async def work(queue: str, log: str, name: str) -> None:
    tokenizer = chat_tokenizer()
    command = [sys.executable, "-E", "-S", str(LIGHT), log]
    async with QueueClient(queue) as client:
        programs = ProgramCache("tools", {"tools": [{"command": command}]})
        await programs.start()
        worker = RolloutWorker(
            client,
            Scripted(tokenizer, [CALL, answer]),  # type: ignore[arg-type]
            tokenizer,
            runs=[RUN],
            worker=name,
            schedule=RowSchedule(slots=1, checkpoint=CheckpointIntervals(tokens=2, ms=20)),
            programs=programs,
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
        await worker.run(grace_s=60)
        await programs.close()


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))

"""Runs hostile code in the tool `python`: it harms its own row at most, and the row beside it keeps its variables."""

from __future__ import annotations

import asyncio
import os
import time

from meshrl.contract.errors import InfraError
from meshrl.contract.types import Uid
from meshrl.rollout.tools.ports import PythonConfig, ToolConfig, ToolError
from meshrl.rollout.tools.python_sandbox import PythonSandbox
from tests.adversarial.attacks import SECRET
from tests.adversarial.programs import HEAD, PROGRAMS

VALUE = "of-the-service-alone"
DEADLINE_S = 2.0
LATE_S = 60.0
"""A call that takes longer is held; a busy machine needs a part of it."""
MOST = 1 << 16
"""Characters that a row may observe of a run."""
CODE = {
    **PROGRAMS,
    "reads the service's environment": "print(open('/proc/1/environ').read(), os.environ)",
    "opens a socket": "quietly(socket.create_connection, ('127.0.0.1', 22), 1)",
    "answers for another row": "os.write(3, b'\"forged\"\\n' * 100)",
    "kills the other rows": "for n in range(99):\n    quietly(os.kill, n, 9)",
}


async def run(only: str = "") -> dict[str, str]:
    """Each program's fault; empty when the row beside it continued, in the same sandbox and with its variables."""
    config = ToolConfig(
        python=PythonConfig(memory_bytes=256 << 20), timeout_s=DEADLINE_S, start_timeout_s=LATE_S
    )
    sandbox = PythonSandbox(config)
    honest = Uid("run", "honest", 0)
    faults: dict[str, str] = {}
    os.environ[SECRET] = VALUE
    try:
        await sandbox.run(honest, "n = 0")
        chosen = [each for each in CODE.items() if only in each[0]]
        for index, (name, code) in enumerate(chosen, start=1):
            fault = await _attacked(sandbox, Uid("run", f"hostile{index}", 0), HEAD + code)
            try:
                told = await sandbox.run(honest, "n += 1; n")
            except (InfraError, ToolError) as error:
                return {**faults, name: f"the row beside it: {error}"}
            if told.strip() != str(index):
                fault = fault or f"the row beside it observed {told[:80]!r}, not {index}"
            faults[name] = fault
    finally:
        del os.environ[SECRET]
        await sandbox.close()
    return faults


async def _attacked(sandbox: PythonSandbox, uid: Uid, code: str) -> str:
    """Harm that a hostile run did to its caller; empty for an observation in time."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(LATE_S):
            told = await sandbox.run(uid, code)
    except ToolError:
        told = ""
    except TimeoutError:
        return f"held its caller for {time.monotonic() - began:.0f} s"
    except InfraError as error:
        return f"the sandbox ended: {error}"
    finally:
        sandbox.release(uid)
    if VALUE in told:
        return "it read a secret of the service"
    return "" if len(told) <= MOST else f"{len(told)} characters observed"

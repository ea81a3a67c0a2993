"""Several ranks of a service on this machine: one process each, started and ended together.

    serve trainer ──┬──▶ rank 0 ◀── SIGTERM (it tells the others in their next collective)
                    └──▶ rank 1 … N-1
    serve trainer --node-rank 1 ───▶ rank N … 2N-1, which meet rank 0 on the first machine

Before all ranks have met, a signal to another machine than the first ends the ranks of that machine; afterwards it
waits for the end of rank 0. When one rank ends, the ranks of all machines end, and `serve` with them; their
supervisors start them again.

A launcher of our own rather than torchrun: torchrun turns every exit code into 1, prints a page for a one-line
mistake, and kills ranks that drain for longer than 30 s. Its variables are the same, so ranks may also be started
by torchrun.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import nullcontext
from functools import partial

from meshrl.common.process_guard import DRAIN_AT_EOF, PARENT_VARIABLE
from meshrl.common.python_process import PYTHON
from meshrl.common.sockets import is_loopback
from meshrl.config.recipe import Recipe
from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import UserError
from meshrl.launcher.address_book import free_port
from meshrl.rpc import credentials
from meshrl.rpc.exit_codes import Exit
from meshrl.rpc.runtime import GrpcServer, ServerSettings, ServiceContext

MEETING_PORT = 29500
"""torchrun's."""


def refuse_open_weights(weights: WeightsConfig, settings: ServerSettings) -> None:
    """Raises UserError if a client of `weights.host` could take the weights without the operator's permission."""
    if weights.may_use_gloo and not is_loopback(weights.host) and not settings.allow_insecure_bind:
        raise UserError(
            f"weights.host {weights.host!r} can be reached from other machines, and gloo neither encrypts nor asks"
            " who receives: set weights.carrier to delta or nccl, or allow_insecure_bind in a network that you trust"
        )


def refuse_open_ranks(recipe: Recipe, settings: ServerSettings) -> None:
    """Raises UserError if gradients would travel between machines without permission."""
    if recipe.trainer.nnodes > 1 and not settings.allow_insecure_bind:
        raise UserError(
            f"trainer.nnodes: {recipe.trainer.nnodes} machines exchange gradients, which torch neither encrypts nor"
            " asks who sends: want allow_insecure_bind, in a network that you trust"
        )


def refuse_open(recipe: Recipe, settings: ServerSettings) -> None:
    """Raises UserError if weights or gradients would be open to others without permission."""
    refuse_open_weights(recipe.weights, settings)
    refuse_open_ranks(recipe, settings)


def is_rank() -> bool:
    """True in a process that a launcher made a rank."""
    return "RANK" in os.environ


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Serve by several ranks on this machine, until the end of the run.

    Raises:
        UserError: other machines cannot reach the first one, or what the trainer sends would be open to others.
        SystemExit: with the code of the rank that failed, which has said why.
    """
    if context.kind == "trainer":
        refuse_open(recipe, context.settings)
    # Rank 0 serves; on another machine this process answers who asks whether it is there.
    async with GrpcServer(context.settings, []) if context.node_rank else nullcontext() as server:
        if server is not None:
            await server.ready()
        if context.kind == "reference":
            count = recipe.reference.nproc
            code = await _run_ranks(count, count, ("127.0.0.1", free_port("127.0.0.1")))
        else:
            trainer = recipe.trainer
            place = _meeting_place(recipe)
            code = await _run_ranks(trainer.nproc, trainer.ranks, place, context.node_rank)
    if code:
        raise SystemExit(code)


async def _run_ranks(count: int, ranks_of_all: int, place: tuple[str, int], node: int = 0) -> int:
    """Run this very command `count` times, as the ranks of machine `node`, which meet those of the others at `place`.

    Returns the exit code of the first rank that failed; else that of a drained one, or 0.
    """
    address, port = place
    world = {
        "WORLD_SIZE": str(ranks_of_all),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        PARENT_VARIABLE: str(os.getpid()),
    }
    ranks = [
        await asyncio.create_subprocess_exec(
            *PYTHON,
            "meshrl.cli",
            *sys.argv[1:],
            env={
                **os.environ,
                **credentials.own_environment(),
                **world,
                "RANK": str(node * count + rank),
                "LOCAL_RANK": str(rank),
            },
        )
        for rank in range(count)
    ]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(_forward, ranks[0], number))
    if node and DRAIN_AT_EOF in os.environ:
        loop.add_reader(sys.stdin.fileno(), partial(_at_eof, ranks[0]))
    waits = {asyncio.ensure_future(rank.wait()) for rank in ranks}
    code = 0
    while waits and code in (0, Exit.DRAINED):
        done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        codes = [code, *(wait.result() for wait in done)]
        code = next((each for each in codes if each not in (0, Exit.DRAINED)), max(codes))
    for rank in ranks:
        if rank.returncode is None:
            # Its siblings' collectives would hang without the rank that failed.
            rank.kill()
    await asyncio.gather(*waits)
    return code if code >= 0 else 128 - code


def _meeting_place(recipe: Recipe) -> tuple[str, int]:
    """Address at which rank 0 listens for the others.

    Raises:
        UserError: other machines cannot reach it.
    """
    if recipe.trainer.nnodes == 1:
        return "127.0.0.1", free_port("127.0.0.1")
    address = os.environ.get("MASTER_ADDR", recipe.weights.host)
    if "MASTER_ADDR" not in os.environ and (is_loopback(address) or address in ("0.0.0.0", "::")):
        raise UserError(
            f"trainer.nnodes: {recipe.trainer.nnodes} machines, which meet at weights.host, and that is {address}:"
            " want the address of the first one (or MASTER_ADDR in the environment)"
        )
    port = os.environ.get("MASTER_PORT", str(MEETING_PORT))
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"MASTER_PORT: {port!r}: want a port")
    return address, int(port)


def _at_eof(rank: asyncio.subprocess.Process) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        _forward(rank, signal.SIGTERM)


def _forward(rank: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if rank.returncode is None:
        rank.send_signal(number)

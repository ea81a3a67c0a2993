"""`meshrl health`: is a service ready for work? What compose's health checks run."""

from __future__ import annotations

import asyncio
import sys

import click

from meshrl.common.plain_text import say
from meshrl.contract.errors import UserError
from meshrl.rpc.exit_codes import Exit


@click.command()
@click.argument("address", metavar="HOST:PORT")
def health(address: str) -> None:
    """Ask the service at HOST:PORT by grpc.health.v1; exit code 0 when it is SERVING, 1 when not."""
    host, port = _parse(address)
    # Imported here: with it comes gRPC, which `--help` can do without.
    from meshrl.launcher.address_book import ServiceAddress
    from meshrl.launcher.service import is_serving

    entry = ServiceAddress(kind="", host=host, port=port, metrics_port=0)
    serving = asyncio.run(is_serving(entry))
    say(f"{entry.address} is {'SERVING' if serving else 'NOT SERVING'}")
    sys.exit(Exit.DONE if serving else Exit.FAILED)


def _parse(address: str) -> tuple[str, int]:
    """Host without brackets, and port. Raises UserError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{address!r} is not an address: want HOST:PORT, e.g. 127.0.0.1:7001")
    return host.removeprefix("[").removesuffix("]"), int(port)

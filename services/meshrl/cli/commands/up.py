"""`meshrl up`: train, with every service as a process of its own on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from meshrl.cli.options import accept_changes_option, preload_option, recipe_argument
from meshrl.contract.errors import UserError
from meshrl.launcher.preloading import preloading


def _ports(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, int]:
    ports = {}
    for value in values:
        name, _, port = value.partition("=")
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise click.BadParameter(f"{value!r}: want SERVICE=PORT, as in queue=7001")
        ports[name] = int(port)
    return ports


@click.command()
@recipe_argument
@click.option(
    "--port",
    "ports",
    multiple=True,
    callback=_ports,
    metavar="SERVICE=PORT",
    help="Let a service listen on this port; the others take free ones. May be given several times.",
)
@click.option("--plain", is_flag=True, help="Print lines instead of the live view.")
@click.option("--view", is_flag=True, help="Serve a page over the run too, and print its address.")
@click.option(
    "--machines",
    metavar="NAME,NAME",
    help="Run the services on these machines, which --launcher reaches; the first one has the queue and the trainer.",
)
@click.option(
    "--launcher",
    metavar="COMMAND",
    help="Command that starts a service on a machine: 'srun ... --nodelist={machine}'. See `meshrl slurm`.",
)
@click.option(
    "--program",
    metavar="COMMAND",
    help="`meshrl` on those machines, e.g. 'apptainer exec mesh.sif meshrl'; this Python if not given.",
)
@accept_changes_option
@preload_option
def up(
    recipe: Path,
    overrides: tuple[str, ...],
    ports: dict[str, int],
    plain: bool,
    view: bool,
    machines: str | None,
    launcher: str | None,
    program: str | None,
    accept_changes: bool,
    preload: bool,
) -> None:
    """Train as RECIPE says: start every service here, watch over them, drain at the end.

    The first Ctrl-C ends the step, saves a checkpoint and drains; the second kills. The same command resumes from
    the last checkpoint. Changes since the run began are reported, or refused before anything starts.
    """
    if (machines is None) != (launcher is None) or (program and not machines):
        raise UserError("--machines and --launcher go together, --program with them")
    # First of all: the preloaders import while this process does.
    with preloading(preload and machines is None) as preloaders:
        from meshrl.config import load_recipe

        loaded = load_recipe(recipe, overrides)
        # Imported here: with it comes gRPC, and a wrong recipe should be answered at once.
        from meshrl.deploy.machines import PROGRAM, Machines
        from meshrl.launcher.up import up as run_up

        elsewhere = None
        if machines is not None and launcher is not None:
            elsewhere = Machines(
                names=tuple(machines.split(",")),
                launcher=tuple(shlex.split(launcher)),
                program=tuple(shlex.split(program)) if program else PROGRAM,
            )
        code = run_up(
            loaded,
            fixed_ports=ports,
            plain=plain,
            view=view,
            accept_changes=accept_changes,
            preloading=preloaders,
            machines=elsewhere,
        )
    sys.exit(code)

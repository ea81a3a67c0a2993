"""The command group: names and one-line helps here, everything else loaded when it is asked for.

Every failure a person can cause ends here as one line on stderr and exit code 2; no traceback is theirs to read.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import click

from meshrl.common.files import lasting_fault
from meshrl.common.plain_text import fit_terminal, harmless_faults, say, say_error
from meshrl.common.plugins import to_install
from meshrl.common.sockets import reach_directly
from meshrl.contract.errors import MeshError, UserError
from meshrl.rpc.exit_codes import Exit

COMMANDS = "meshrl.cli.commands"


@dataclass(frozen=True, slots=True)
class Lazy:
    """A command that is not imported until it runs."""

    target: str
    """`module:attribute`."""
    help: str


KNOWN: Mapping[str, Lazy] = {
    "up": Lazy(f"{COMMANDS}.up:up", "Train: start every service on this machine."),
    "demo": Lazy("meshrl.cli.demo.command:demo", "Make a tiny model and train it, end to end."),
    "init": Lazy(
        f"{COMMANDS}.init:init", "Write a recipe: your own, or one that comes with meshrl."
    ),
    "slurm": Lazy(
        "meshrl.cli.deploy:slurm", "Print a batch script: train on the nodes of a Slurm cluster."
    ),
    "kubernetes": Lazy(
        "meshrl.cli.deploy:kubernetes", "Print manifests: train on a Kubernetes cluster."
    ),
    "credentials": Lazy(
        "meshrl.cli.deploy:credentials", "Make a run's credentials, before it starts."
    ),
    "serve": Lazy(f"{COMMANDS}.serve:serve", "Run one service, in the foreground."),
    "sft": Lazy(f"{COMMANDS}.offline:sft", "Fine-tune on prompt/response pairs."),
    "dpo": Lazy(f"{COMMANDS}.offline:dpo", "Learn from preferences: DPO, IPO."),
    "train-reward": Lazy(f"{COMMANDS}.offline:train_reward", "Train a reward model."),
    "eval": Lazy(f"{COMMANDS}.evaluate:evaluate", "Score a checkpoint on held-out prompts."),
    "export": Lazy(f"{COMMANDS}.export:export", "Turn a checkpoint into a Hugging Face directory."),
    "status": Lazy(f"{COMMANDS}.status:status", "Show a mesh, or the results of its run."),
    "runs": Lazy(f"{COMMANDS}.runs:runs", "List the runs in a folder, with figures."),
    "report": Lazy(f"{COMMANDS}.report:report", "Write one HTML file about a run."),
    "plot": Lazy(f"{COMMANDS}.report:plot", "Draw curves on the terminal or as a picture."),
    "view": Lazy(f"{COMMANDS}.view:view", "Show runs on a web page: curves, fleet, rollouts."),
    "fleet": Lazy(f"{COMMANDS}.fleet:fleet", "List, add and drain rollout workers."),
    "rows": Lazy(f"{COMMANDS}.rows:rows", "Show responses with their rewards."),
    "replay": Lazy(f"{COMMANDS}.rows:replay", "Compute a logged step again, and compare."),
    "trace": Lazy(f"{COMMANDS}.rows:trace", "Show a row from prompt to gradient, with times."),
    "ledger": Lazy(f"{COMMANDS}.queue:ledger", "Count the admitted rows by state."),
    "why-waiting": Lazy(f"{COMMANDS}.queue:why_waiting", "List what blocks, since when, and who."),
    "dead-letters": Lazy(f"{COMMANDS}.queue:dead_letters", "List and replay rows given up."),
    "queue": Lazy(f"{COMMANDS}.queue:queue", "Back up, restore, verify what a queue stores."),
    "reward": Lazy(f"{COMMANDS}.reward:reward", "Submit reward functions while training runs."),
    "health": Lazy(f"{COMMANDS}.health:health", "Ask if the service at HOST:PORT is ready."),
    "plan": Lazy(f"{COMMANDS}.plan:plan", "Plan how many GPUs sample and train."),
    "config": Lazy(
        f"{COMMANDS}.config:config", "Check, show, explain recipes; make one from verl."
    ),
    "data": Lazy("meshrl.cli.data:data", "Check, show, count the rows of a recipe's data."),
}


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage: what is imported or read stays, and to look through it takes a tenth of `config check`."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class LazyCommands(click.Group):
    """Lists commands without importing them."""

    def list_commands(self, context: click.Context) -> list[str]:
        """In the order of the table, which is the order of use."""
        return list(KNOWN)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import the command that runs."""
        if name not in KNOWN:
            return None
        module, _, attribute = KNOWN[name].target.partition(":")
        with uncollected():
            command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in KNOWN.items()])


@click.group(
    cls=LazyCommands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A recipe's keys are overridden as a.b=c, e.g.: meshrl up my.yaml rollout.n=16",
)
@click.version_option(package_name="meshrl")
def cli() -> None:
    """Asynchronous RL post-training of language models, as a mesh of services."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    # Progress bars of libraries; in a log of several services each redraw would be a line.
    os.environ.setdefault("TQDM_DISABLE", "1")
    reach_directly(os.environ)
    if arguments is None:  # it is a process of its own
        harmless_faults()
        fit_terminal()
    try:
        code = cli.main(
            args=list(arguments) if arguments is not None else None,
            prog_name="meshrl",
            standalone_mode=False,
        )
    except click.ClickException as error:
        error.show(said := io.StringIO())
        say(said.getvalue().removesuffix("\n"), err=True, lines=True)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        # Who read us has gone (`meshrl ... | head`); nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = Exit.FAILED
    except MeshError as error:
        code = report(error)
    except ModuleNotFoundError as error:
        if not (install := to_install(error)):
            raise
        say_error(f"this needs {error.name}, which is not installed: {install}")
        code = Exit.USER_ERROR
    except OSError as error:
        if not (fault := lasting_fault(error)):
            raise
        say_error(fault)
        code = Exit.FAILED
    sys.exit(code if isinstance(code, int) else Exit.DONE)


def report(error: MeshError) -> int:
    """Say what went wrong, one line per problem; the exit code for it."""
    say_error(error)
    return Exit.USER_ERROR if isinstance(error, UserError) else Exit.FAILED

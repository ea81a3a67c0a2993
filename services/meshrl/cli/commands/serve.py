"""`meshrl serve`: one service in the foreground, the same under `up`, compose, systemd and Kubernetes."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Collection, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from meshrl.cli.options import PATH, accept_changes_option, recipe_argument
from meshrl.common import plugins, tracing
from meshrl.common.device_lease import DEVICES
from meshrl.common.files import lasting_fault, make_private
from meshrl.common.plain_text import LogFormatter, RepeatedLines, say, say_error
from meshrl.common.process_guard import die_with_supervisor
from meshrl.common.sockets import TRUSTED_VARIABLE
from meshrl.config import Recipe, load_recipe
from meshrl.config.machine import ThisMachine
from meshrl.config.placement import Placement, place
from meshrl.config.recipe import RUNNING_NAME
from meshrl.config.run_record import begin, refuse_several_queues
from meshrl.config.stages import SERVICES, module_of, service_kind
from meshrl.contract.errors import ConfigError, UserError
from meshrl.launcher.address_book import AddressBook, is_taken
from meshrl.rpc.exit_codes import Exit

log = logging.getLogger(__name__)


@click.command()
@click.argument("service")
@recipe_argument
@click.option("--name", envvar="MESHRL_NAME", help="Unique in the mesh; SERVICE if not given.")
@click.option(
    "--host",
    envvar="MESHRL_HOST",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on.",
)
@click.option(
    "--port",
    envvar="MESHRL_PORT",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port for the mesh; a free one if not given.",
)
@click.option(
    "--metrics-port",
    envvar="MESHRL_METRICS_PORT",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port for Prometheus; a free one if not given.",
)
@click.option(
    "--allow-insecure-bind",
    envvar="MESHRL_ALLOW_INSECURE_BIND",
    is_flag=True,
    help="Listen and call beyond this machine, unencrypted: only in a network that you trust.",
)
@click.option(
    "--queue",
    envvar="MESHRL_QUEUE",
    metavar="HOST:PORT",
    help="Address of the queue.",
)
@click.option(
    "--trainer", envvar="MESHRL_TRAINER", metavar="HOST:PORT", help="Address of the trainer."
)
@click.option(
    "--reward", envvar="MESHRL_REWARD", metavar="HOST:PORT", help="Address of the reward service."
)
@click.option(
    "--node-rank",
    envvar=("MESHRL_NODE_RANK", "NODE_RANK", "JOB_COMPLETION_INDEX", "SLURM_NODEID"),
    type=click.IntRange(min=0),
    help="Which of the trainer's machines this is, from 0 to trainer.nnodes - 1.",
)
@click.option(
    "--address-book",
    envvar="MESHRL_ADDRESS_BOOK",
    type=PATH,
    help="mesh.json of `up`: says where this service listens and where the others are.",
)
@click.option(
    "--credential-file",
    envvar="MESHRL_CREDENTIAL_FILE",
    type=PATH,
    help="Credential for calls; that of the service's role in <run.dir>/credentials if not given.",
)
@click.option(
    "--verifiers-file",
    envvar="MESHRL_VERIFIERS_FILE",
    type=PATH,
    help="Hashes of the credentials that callers must present; <run.dir>/credentials/verifiers.json if not given.",
)
@click.option(
    "--log-level",
    envvar="MESHRL_LOG_LEVEL",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    default="INFO",
)
@accept_changes_option
@click.option(
    "--stay-on-user-error",
    envvar="MESHRL_STAY_ON_USER_ERROR",
    is_flag=True,
    help="Wait for SIGTERM before exit code 2, for supervisors that would start it again.",
)
def serve(
    service: str,
    recipe: Path,
    overrides: tuple[str, ...],
    stay_on_user_error: bool,
    **options: Any,
) -> None:
    """Run one SERVICE of RECIPE until SIGTERM or Ctrl-C, which drain it.

    SERVICE is queue, rollout, reward, reference, trainer, feeder, tinker, or a stage of the recipe.
    """
    die_with_supervisor()
    # Before gRPC is imported; `meshrl.launcher.preloading` says why.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        code = _serve(service, recipe, overrides, options)
    except UserError as error:
        if not stay_on_user_error:
            raise
        say_error(error)
        code = Exit.USER_ERROR
    except OSError as error:
        if not (fault := lasting_fault(error)):
            raise
        say_error(fault)
        code = Exit.REFUSED
    if code == Exit.USER_ERROR and stay_on_user_error:
        signals = (signal.SIGTERM, signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        say("the same command would fail again: waiting to be stopped", err=True)
        signal.sigwait(signals)
    sys.exit(code)


def _serve(service: str, recipe: Path, overrides: tuple[str, ...], options: dict[str, Any]) -> int:
    """The service until its end; returns its exit code. Raises UserError: it cannot start like this."""
    lines = logging.StreamHandler()
    lines.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    lines.addFilter(RepeatedLines())
    logging.basicConfig(level=options["log_level"].upper(), handlers=[lines])
    # It logs each request: with an engine server, a line for every row.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    loaded = load_recipe(recipe, overrides, sections=partial(_sections, service))
    refuse_several_queues(loaded.run.path)
    node_rank = _node_rank(loaded, service, options["node_rank"])
    placed = f"{service}-{node_rank}" if node_rank else service
    name = options["name"] or placed
    placed = placed if service == "trainer" else name
    loaded = take_share(loaded, service, placed, ThisMachine(), os.environ)
    if recipe.name != RUNNING_NAME:  # `up` has compared what it wrote
        _compare(loaded, service, node_rank, options["accept_changes"])
    # The runtime is imported here, not above: with it comes gRPC, which `--help` can do without.
    from meshrl.launcher import ranks
    from meshrl.rpc import credentials, tls
    from meshrl.rpc.runtime import ServerSettings, ServiceContext, run_service

    tls.use(loaded.tls.certificates)
    if options["allow_insecure_bind"]:  # of the processes that it starts, too
        os.environ[TRUSTED_VARIABLE] = "1"
    credentials.use_for_service(
        loaded.run.path,
        service,
        credential_file=options["credential_file"],
        verifiers=options["verifiers_file"],
    )

    host, port = options["host"], options["port"]
    metrics_port = options["metrics_port"]
    peers = {kind: options[kind] for kind in ("queue", "trainer", "reward") if options[kind]}
    if options["address_book"] is not None:
        address_book = AddressBook.load(options["address_book"])
        peers = {**address_book.peers(), **peers}
        own = address_book.services.get(name)
        if own is not None:
            host, port, metrics_port = own.host, own.port, own.metrics_port
    listens = os.environ.get("RANK", "0") == "0"  # of a trainer's ranks, the first one alone
    for wanted in (port, metrics_port):
        if listens and is_taken(host, wanted):
            say(f"error: {name} cannot listen on {host}:{wanted}: the port is in use", err=True)
            return Exit.PORT_IN_USE
    settings = ServerSettings(
        host=host,
        port=port,
        metrics_port=metrics_port,
        allow_insecure_bind=options["allow_insecure_bind"],
        tls=loaded.tls.certificates,
        verifiers=credentials.verifiers_in_use(),
        certificate_roles={
            certified: credentials.MeshRole(role) for certified, role in loaded.tls.roles.items()
        },
    )
    tracing.start(
        loaded.run.path / tracing.FOLDER, name, loaded.run.trace, otlp=loaded.run.trace_otlp
    )
    several = service_kind(loaded, service).ranks(loaded) > 1 and not ranks.is_rank()
    run = ranks.run if several else plugins.load(SERVICES, module_of(loaded, service), "run")
    context = ServiceContext(
        name=name,
        kind=service,
        settings=settings,
        node_rank=node_rank,
        addresses=peers,
        accept_changes=options["accept_changes"],
    )
    return run_service(lambda: run(loaded, context))


def _compare(recipe: Recipe, service: str, node_rank: int, accept_changes: bool) -> None:
    """Refuse what the run did not begin with, and say what was changed.

    The trainer remembers it, of several machines and ranks the first. Others compare the files that they open.

    Raises:
        UserError: a line for each key that cannot be changed like this.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    trains = service == "trainer"
    lines = begin(
        recipe,
        accept_changes=accept_changes,
        writes=trains and not node_rank,
        sections=None if trains else _sections(service, recipe),
    )
    for line in lines:
        log.info("%s", line)


def _node_rank(recipe: Recipe, service: str, given: int | None) -> int:
    """The number of this machine among the service's. Raises UserError for none, or one that it lacks."""
    nodes = service_kind(recipe, service).machines(recipe)
    if service != "trainer":
        return 0
    if "RANK" in os.environ:  # of torchrun, or of another `serve`
        return int(os.environ.get("GROUP_RANK", "0")) if nodes > 1 else 0
    if given is None and nodes == 1:
        return 0
    if given is None:
        raise UserError(
            f"trainer.nnodes: {nodes} machines, and nothing says which one this is: want --node-rank,"
            f" 0 to {nodes - 1}"
        )
    if given >= nodes:
        raise UserError(
            f"--node-rank: {given}, and trainer.nnodes is {nodes}: want 0"
            + (f" to {nodes - 1}" if nodes > 1 else "")
        )
    return given


def take_share(
    recipe: Recipe,
    service: str,
    name: str,
    machine: ThisMachine,
    environment: MutableMapping[str, str],
) -> Recipe:
    """Put this service's part of the machine's GPUs into `environment`; returns the recipe as it was placed.

    Where `up` gave it one, or CUDA_VISIBLE_DEVICES is set, it keeps that. Where the services do not all find
    room here, some of them are elsewhere, and it is unknown which.

    Raises:
        UserError: the placement has no place for it here.
    """
    if DEVICES in environment:
        return recipe
    try:
        placement = place(recipe, machine)
    except ConfigError as error:
        if recipe.placement.machines:
            raise
        log.warning("the GPUs are not divided, %s sees all of them: %s", name, error)
        return recipe
    own = placement.places.get(name)
    if own is None and service == "rollout" and placement.worker_gpus:
        own = placement.places[_claimed(placement, recipe.run.path)]
    if own is not None:
        hosts = [host.name for host in placement.hosts]
        if recipe.placement.machines and own.host.name != socket.gethostname():
            raise UserError(
                f"{name} is placed on {own.host.name}, and this is {socket.gethostname()}"
                f" (placement.machines has {', '.join(hosts)})"
            )
        environment.update(own.share.environment)
    return placement.recipe


def _claimed(placement: Placement, run_dir: Path) -> str:
    """The first rollout worker of the placement on this host that no other process is, until this process ends.

    For workers whose supervisor gives them names of its own, as containers have. Raises UserError.
    """
    here = [
        each.service
        for each in placement.places.values()
        if each.service.startswith("rollout-")
        and (len(placement.hosts) == 1 or each.host.name == socket.gethostname())
    ]
    folder = run_dir / "placement"
    make_private(run_dir, "run.dir")
    folder.mkdir(exist_ok=True)
    for worker in here:
        descriptor = os.open(folder / worker, os.O_RDWR | os.O_CREAT, 0o660)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        return worker
    raise UserError(
        f"the GPUs here have room for {len(here)} rollout workers, and all of them run; see rollout.workers"
    )


def _sections(service: str, recipe: Recipe) -> Collection[str]:
    return ("stages", *service_kind(recipe, service).sections)

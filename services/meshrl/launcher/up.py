"""The `up` command: lock the run's directory, plan, supervise, show, and say at the end what came of it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live

from meshrl.common.plain_text import say, say_error
from meshrl.common.python_process import PYTHON
from meshrl.config.machine import ThisMachine
from meshrl.config.placement import place
from meshrl.config.recipe import Recipe
from meshrl.config.run_record import begin, refuse_several_queues
from meshrl.contract.errors import UserError
from meshrl.contract.types import TrainerStatus
from meshrl.deploy.machines import Machines
from meshrl.http.view.metrics import MetricsFile
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, run_lock
from meshrl.launcher.control import Answer, Operation, control_socket
from meshrl.launcher.observer import Observer
from meshrl.launcher.plan import LaunchPlan, ProbeOf
from meshrl.launcher.preloading import Preloading
from meshrl.launcher.processes import LineSink, ServiceProcess
from meshrl.launcher.run_directory import (
    RecipeOnTrial,
    busy_port,
    finished_line,
    note_finished,
    recipe_on_trial,
)
from meshrl.launcher.service import Service, health_probe
from meshrl.launcher.supervisor import Supervisor, Verdict
from meshrl.launcher.text_console import MergedLog, text_console
from meshrl.launcher.view import MeshStatus, final_table, live_view, step_line, waiting_lines
from meshrl.rpc import credentials, tls
from meshrl.rpc.exit_codes import Exit
from meshrl.trainer.metrics.learning_signs import warnings_of

MOST_AT_ONCE = 64
"""Workers that one `add` may ask for: more is a slip of the finger on one machine."""


class FleetOperations:
    """Operations of the control socket on rollout workers."""

    def __init__(
        self,
        plan: LaunchPlan,
        supervisor: Supervisor,
        probe_of: ProbeOf,
        log: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._probe_of = probe_of
        self._log = log

    @property
    def operations(self) -> Mapping[str, Operation]:
        """The operations by name."""
        return {"add": self.add, "drain": self.drain, "members": self.members}

    async def add(self, request: Mapping[str, object]) -> Answer:
        """Start `count` more rollout workers; answers with their names as soon as they are started."""
        count = request.get("count", 1)
        if not isinstance(count, int) or not 1 <= count <= MOST_AT_ONCE:
            raise UserError(f"count is {count!r}, want 1 to {MOST_AT_ONCE}")
        self._supervisor.check_running()
        names = []
        for _ in range(count):
            service = self._plan.add_rollout(self._probe_of)
            self._supervisor.add(service)
            names.append(service.name)
        self._log(f"fleet: added {', '.join(names)}")
        return {"added": names}

    async def drain(self, request: Mapping[str, object]) -> Answer:
        """End the worker `name` without a restart; returns when it has exited."""
        name = str(request.get("name"))
        if name in self._supervisor.states:
            self._log(f"fleet: draining {name}")
        in_time = await self._supervisor.drain(name)
        self._plan.remove(name)
        left = len(self._plan.address_book.of_kind("rollout"))
        self._log(f"fleet: {name} has {'left' if in_time else 'been killed'}, {left} remain")
        return {"drained": name, "in_time": in_time, "left": left}

    async def members(self, request: Mapping[str, object]) -> Answer:
        """The state of every rollout worker that this `up` ever had."""
        return {
            name: {"phase": state.phase, "pid": state.pid, "restarts": state.restarts}
            for name, state in self._supervisor.states.items()
            if name.startswith("rollout-")
        }


REDRAW_S = 0.25
STEP_LINE_S = 3.0
"""Seconds between two lines of progress: small models make several steps a second."""
WAITING_LINE_S = 30.0
LOG_BYTES = 16 << 20
"""A service's log of this size is moved aside: `queue.log` becomes `queue.log.1`, that one `queue.log.2`."""
LOGS_KEPT = 4
"""Logs of one service that were moved aside and stay, the newest ones."""
SAME_REQUEST_S = 2.0
"""A SIGTERM so soon after the first one repeats it: Slurm sends it to `up`, and to the shell that passes it on."""
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


def up(
    recipe: Recipe,
    *,
    fixed_ports: Mapping[str, int],
    plain: bool,
    view: bool = False,
    accept_changes: bool = False,
    preloading: Preloading | None = None,
    machines: Machines | None = None,
) -> int:
    """Run the mesh of `recipe` to its end, with `view` beside a page over it; the exit code.

    `machines` says where services run; None: here. `accept_changes` continues the run with other data, another model
    or another reward than it began with.

    Raises:
        UserError: the run's directory is in use, `fixed_ports` names no service, `machines` do not fit the recipe, or
            the recipe is not that of the run in the directory, or that run's queue was several processes.
    """
    tls.use(recipe.tls.certificates)
    directory = recipe.run.path
    refuse_several_queues(directory)
    credentials.open_run_directory(directory)
    operator = credentials.file_of_role(directory, credentials.MeshRole.OPERATOR)
    credentials.use(credentials.Credential(operator), credentials.verifiers_file(directory))
    console = text_console(soft_wrap=True)
    with run_lock(directory):
        if (line := finished_line(recipe)) is not None:
            console.print(line)
            return Exit.DONE
        if (line := busy_port(recipe, fixed_ports)) is not None:
            say_error(line)
            return Exit.PORT_IN_USE
        if machines is not None:
            recipe = machines.prepared(recipe)
        elif len(recipe.placement.machines) > 1:
            raise UserError(
                f"placement.machines: {len(recipe.placement.machines)} machines, and `up` starts services on this one"
                " only: name the others by --machines and --launcher, or start each service with `meshrl serve`"
            )
        elif recipe.trainer.nnodes > 1:
            raise UserError(
                f"trainer.nnodes: {recipe.trainer.nnodes}, and `up` starts services on this machine only: name"
                " the others by --machines and --launcher, or start each service with `meshrl serve`"
            )
        placement = place(recipe, ThisMachine())
        recipe = placement.recipe
        for line in (*placement.lines(), *begin(recipe, accept_changes=accept_changes)):
            console.print(line)
        with recipe_on_trial(recipe, directory) as trial:
            book = directory / ADDRESS_BOOK_NAME
            plan = LaunchPlan(
                recipe,
                trial.running,
                book,
                fixed_ports,
                kept_recipe=trial.accepted,
                placement=placement,
                machines=machines,
            )
            verdict, mesh_status = asyncio.run(
                _supervise(recipe, plan, trial, console, plain, view, preloading)
            )
            if verdict.code != Exit.USER_ERROR:
                trial.accept()
        mesh_status.recall(recipe.metrics_path)
        if verdict.finished:
            note_finished(recipe, mesh_status)
    files = {
        "checkpoints": str(recipe.checkpoint_dir),
        "metrics": str(recipe.metrics_path),
        "logs": str(directory / "logs"),
    }
    console.print(final_table(mesh_status, files))
    with suppress(BrokenPipeError):  # of stderr, too
        _tell(verdict, mesh_status)
    return verdict.code


def _tell(verdict: Verdict, mesh_status: MeshStatus) -> None:
    """Say on stderr why the run is not finished."""
    if verdict.stopped:
        at = "" if mesh_status.saved_step is None else f" at step {mesh_status.saved_step}"
        say(f"{verdict.line}{at}; the same command continues from there", err=True)
    elif not verdict.finished:
        say(f"error: {verdict.line}", err=True)


async def _supervise(
    recipe: Recipe,
    plan: LaunchPlan,
    trial: RecipeOnTrial,
    console: Console,
    plain: bool,
    view: bool,
    preloading: Preloading | None,
) -> tuple[Verdict, MeshStatus]:
    services = plan.services(health_probe)
    names = [service.name for service in services]
    with MergedLog(
        recipe.run.path / "logs",
        names,
        console,
        max_bytes=LOG_BYTES,
        keep=LOGS_KEPT,
    ) as log:
        # The observer reads the supervisor's states, and the supervisor asks the observer for a last look.
        supervisor = Supervisor(
            services,
            log,
            last_look=lambda: observer.look_last(),
            steps=lambda: mesh_status.steps,
            preloading=preloading,
        )
        mesh_status = MeshStatus(run=recipe.run.name, states=supervisor.states)
        live = console.is_terminal and not plain

        last_line_s = -STEP_LINE_S
        metrics = MetricsFile(recipe.metrics_path)

        def on_step(status: TrainerStatus) -> None:
            nonlocal last_line_s
            if mesh_status.steps == 1:
                trial.accept()  # whatever ends the run from here on: it has trained with this recipe
            metrics.refresh()
            mesh_status.warnings = warnings_of(metrics.values)
            if not live and mesh_status.elapsed_s - last_line_s >= STEP_LINE_S:
                last_line_s = mesh_status.elapsed_s
                log("up", step_line(mesh_status, status))

        observer = Observer(mesh_status, lambda: plan.address_book, on_step)
        loop = asyncio.get_running_loop()
        stopping = _Stopping(supervisor, log)
        for number in SIGNALS:
            loop.add_signal_handler(number, stopping.on_signal, number)
        log.on_lost = stopping.on_lost
        log("up", f"run {recipe.run.name}: {', '.join(names)}; files in {recipe.run.path}")
        showing = _live(mesh_status, console) if live else _lines(mesh_status, log)
        fleet = FleetOperations(plan, supervisor, health_probe, partial(log, "up"))
        control = control_socket(recipe.run.path, fleet.operations)
        page = view_page(recipe.run.path, log) if view else nullcontext()
        async with observer.observing(), showing, control, page:
            verdict = await supervisor.run()
    return verdict, mesh_status


class _Stopping:
    """The first signal drains, the second one kills."""

    def __init__(self, supervisor: Supervisor, log: MergedLog) -> None:
        self._supervisor = supervisor
        self._log = log
        self._repeated_until = 0.0

    def on_signal(self, number: signal.Signals) -> None:
        """Stop as `number` asks."""
        now = time.monotonic()
        if number == signal.SIGTERM and now < self._repeated_until:
            return
        self._repeated_until = now + SAME_REQUEST_S
        if not self._supervisor.stopping:
            self._log(
                "up", f"{SIGNALS[number]}: draining, the trainer first; once more kills at once"
            )
        self._supervisor.stop(f"stopped by {SIGNALS[number]}", 128 + number)

    def on_lost(self) -> None:
        """Stop as for a terminal that is lost: nobody sees how the run continues."""
        self._supervisor.stop("stopped by a closed pipe", 128 + signal.SIGPIPE)


@asynccontextmanager
async def _live(mesh_status: MeshStatus, console: Console) -> AsyncIterator[None]:
    """Redraw while the body runs; the log scrolls above."""
    with Live(console=console, auto_refresh=False, transient=True) as live:

        async def redraw() -> None:
            while True:
                live.update(live_view(mesh_status), refresh=True)
                await asyncio.sleep(REDRAW_S)

        async with _beside(redraw()):
            yield


@asynccontextmanager
async def _lines(mesh_status: MeshStatus, log: MergedLog) -> AsyncIterator[None]:
    """Steps are lines already; only a trainer that is stuck needs more."""

    async def explain() -> None:
        while True:
            await asyncio.sleep(WAITING_LINE_S)
            for line in waiting_lines(mesh_status):
                log("up", f"the trainer waits: {line}")

    async with _beside(explain()):
        yield


@asynccontextmanager
async def view_page(directory: Path, log: LineSink) -> AsyncIterator[None]:
    """Serve `meshrl view` in a process of its own while the body runs. Its end does not end the run."""
    argv = (*PYTHON, "meshrl.cli", "view", str(directory))
    env = credentials.service_environment(directory, credentials.MeshRole.READER)
    service = Service(name="view", argv=argv, env=env)
    process = await ServiceProcess.start(service, log)
    try:
        yield
    finally:
        process.kill_group()
        await process.done


@asynccontextmanager
async def _beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run a coroutine for as long as the body runs."""
    task = asyncio.create_task(work, name="up-view")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""The HTTP app of the page: static files for everybody, data of the runs for who has a token or a credential."""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, Protocol

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request
from pydantic import BaseModel
from starlette.middleware import Middleware
from starlette.responses import StreamingResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshrl.config.recipe import METRICS_NAME
from meshrl.contract.errors import (
    ForbiddenError,
    MeshError,
    NotFoundError,
    UnauthenticatedError,
    UserError,
)
from meshrl.http.common import AsciiJSON, BodyLimit, install, problem
from meshrl.http.view import settings
from meshrl.http.view.metrics import MetricsFile, SpanFiles
from meshrl.rpc.credentials import sha256, verifiers_file
from meshrl.rpc.identity import VIEW, Identity, Presented
from meshrl.trainer.metrics.learning_signs import SIGNS, warnings_of
from meshrl.trainer.trajectories.files import Split

STATIC: Final = Path(__file__).with_name("static")
REPLAY: Final = "/meshrl.v1.Queue/Replay"
WATCH_EVERY_S: Final = 1.0
KEEPALIVE_S: Final = 15.0
MOST_ROWS: Final = 200
MAX_BODY_BYTES: Final = 1 << 16
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every response. The page loads nothing from elsewhere, and no text becomes markup or script in it."""


class LiveServices(Protocol):
    """Reports of a run's services, as JSON. The methods raise MeshError."""

    def is_up(self, run_dir: Path) -> bool:
        """True while the run is made."""
        ...

    async def fleet(self, run_dir: Path) -> dict[str, Any]:
        """The rollout workers."""
        ...

    async def flow(self, run_dir: Path) -> dict[str, Any]:
        """The ledger, the waits, the dead letters."""
        ...

    async def replay(self, run_dir: Path, stage: str, outcome: str, reason: str) -> int:
        """Admit the rows again that were given up for `reason` (as `flow` tells it); returns how many."""
        ...


@dataclass(slots=True)
class ViewedRun:
    """One run directory."""

    key: str
    """Its name in addresses."""
    directory: Path
    metrics: MetricsFile = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.metrics = MetricsFile(self.directory / METRICS_NAME)

    def state(self, up: bool) -> dict[str, Any]:
        """The state whose changes are streamed to the page."""
        with self.lock:
            self.metrics.refresh()
            return {
                "key": self.key,
                "directory": str(self.directory),
                "up": up,
                "generation": self.metrics.generation,
                "lines": self.metrics.lines,
                "step": self.metrics.last_step,
                "problem": self.metrics.problem,
                "warnings": [
                    {"key": one.sign.key, "title": one.sign.title, "text": one.text}
                    for one in warnings_of(self.metrics.values)
                ],
            }


def viewed_runs(directories: Sequence[Path]) -> list[ViewedRun]:
    """Runs with keys of their own: the name of the directory, with a number where two have the same."""
    runs: dict[str, ViewedRun] = {}
    for directory in dict.fromkeys(directories):
        key = name = directory.resolve().name or "run"
        number = 1
        while key in runs:
            number += 1
            key = f"{name}-{number}"
        runs[key] = ViewedRun(key, directory)
    return list(runs.values())


class Admission:
    """Admits who shows the page's own token, or a reader's or operator's credential of every run."""

    def __init__(self, token: str, runs: Sequence[ViewedRun]) -> None:
        self._digest = sha256(token)
        files = {run.key: verifiers_file(run.directory) for run in runs}
        self._identities = {
            key: Identity(file if file.exists() else None) for key, file in files.items()
        }

    def __call__(self, authorization: Annotated[str, Header()] = "") -> None:
        """Raises UnauthenticatedError, ForbiddenError."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(sha256(token), self._digest):
            return
        try:
            for identity in self._identities.values():
                identity.admit(VIEW, Presented(authorization=authorization))
        except UnauthenticatedError as error:
            raise UnauthenticatedError(
                "this page needs its token, or a reader's credential of each of its runs: open the address that "
                "`meshrl view` printed"
            ) from error

    def check_operator(self, key: str, authorization: str) -> None:
        """Let an operator of a run pass, as the queue does; the page's own token is none.

        Raises:
            UnauthenticatedError, ForbiddenError: the credential is no operator's.
        """
        self._identities[key].admit(REPLAY, Presented(authorization=authorization))


class _Headers:
    """ASGI middleware: adds HEADERS."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        await self._app(scope, receive, with_headers)


@dataclass(frozen=True, slots=True)
class _Shown:
    """Objects that the routes share."""

    runs: Mapping[str, ViewedRun]
    live: LiveServices
    closing: asyncio.Event
    admission: Admission

    def states(self) -> list[dict[str, Any]]:
        return [run.state(self.live.is_up(run.directory)) for run in self.runs.values()]

    def run(self, key: str) -> ViewedRun:
        """Raises NotFoundError."""
        if key not in self.runs:
            raise NotFoundError(f"no run {key!r} here; there are: {', '.join(self.runs)}")
        return self.runs[key]


def _shown(request: Request) -> _Shown:
    shown: _Shown = request.app.state.shown
    return shown


All = Annotated[_Shown, Depends(_shown)]


def _run(key: str, shown: All) -> ViewedRun:
    return shown.run(key)


Run = Annotated[ViewedRun, Depends(_run)]


def build_app(
    runs: Sequence[ViewedRun],
    live: LiveServices,
    admission: Admission,
    closing: asyncio.Event | None = None,
) -> FastAPI:
    """The app; when `closing` is set, streams end."""
    app = FastAPI(
        title="meshrl view",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        default_response_class=AsciiJSON,
        middleware=[
            Middleware(_Headers),
            Middleware(BodyLimit, limit=MAX_BODY_BYTES, refuse=problem),
        ],
    )
    app.state.shown = _Shown(
        {run.key: run for run in runs}, live, closing or asyncio.Event(), admission
    )
    install(app)
    router = APIRouter(prefix="/api", dependencies=[Depends(admission)])
    for add in (_add_runs, _add_live, _add_timeline, _add_settings, _add_rows):
        add(router)
    app.include_router(router)
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def _add_runs(router: APIRouter) -> None:
    """Add routes of the curves, and of what changes."""

    @router.get("/runs")
    def list_runs(shown: All) -> list[dict[str, Any]]:
        return shown.states()

    @router.get("/signs")
    def signs() -> list[dict[str, Any]]:
        """Meanings of the warnings: the paragraphs of docs/how-to/learning-fails.md."""
        return [
            {"key": sign.key, "title": sign.title, "metrics": sign.metrics, "command": sign.command}
            | {"means": sign.means, "change": sign.change}
            for sign in SIGNS
        ]

    @router.get("/events")
    async def events(shown: All) -> StreamingResponse:
        stream = changes(shown.states, shown.closing)
        return StreamingResponse(stream, media_type="text/event-stream")

    @router.get("/runs/{key}/metrics")
    def metrics(
        run: Run,
        name: Annotated[list[str], Query(default_factory=list)],
        generation: int = -1,
        after: int = 0,
    ) -> dict[str, Any]:
        """Curves of the named metrics; only what came after line `after` if `generation` is still right."""
        with run.lock:
            run.metrics.refresh()
            start = after if generation == run.metrics.generation else 0
            curves = run.metrics.curves(name, start)
            return {
                "generation": run.metrics.generation,
                "lines": run.metrics.lines,
                "after": start,
                "names": run.metrics.names,
                "curves": {each: asdict(curve) for each, curve in curves.items()},
                "problem": run.metrics.problem,
            }


async def changes(
    look: Callable[[], list[dict[str, Any]]],
    closing: asyncio.Event,
    every_s: float = WATCH_EVERY_S,
) -> AsyncIterator[str]:
    """Server-sent events: the states at first, then those that changed; a comment where nothing does for long."""
    sent: dict[str, dict[str, Any]] = {}
    silent_s = 0.0
    while not closing.is_set():
        fresh = [
            state for state in await asyncio.to_thread(look) if sent.get(state["key"]) != state
        ]
        sent |= {state["key"]: state for state in fresh}
        silent_s += every_s
        if fresh:
            yield f"data: {json.dumps(fresh)}\n\n"
        elif silent_s >= KEEPALIVE_S:
            yield ": still here\n\n"
        else:
            await _sleep(closing, every_s)
            continue
        silent_s = 0.0
        await _sleep(closing, every_s)


async def _sleep(closing: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await closing.wait()
    except TimeoutError:
        return


class Letters(BaseModel):
    """Rows that were given up alike."""

    stage: str
    outcome: str
    reason: str


def _add_live(router: APIRouter) -> None:
    """Add routes that ask the services."""

    @router.get("/runs/{key}/fleet")
    async def fleet(run: Run, shown: All) -> dict[str, Any]:
        return await _answer(shown.live.fleet(run.directory))

    @router.get("/runs/{key}/flow")
    async def flow(run: Run, shown: All) -> dict[str, Any]:
        return await _answer(shown.live.flow(run.directory))

    @router.get("/runs/{key}/rights")
    def rights(
        run: Run, shown: All, authorization: Annotated[str, Header()] = ""
    ) -> dict[str, bool]:
        """Rights of the caller to change the run."""
        try:
            shown.admission.check_operator(run.key, authorization)
        except (UnauthenticatedError, ForbiddenError):
            return {"replay": False}
        return {"replay": True}

    @router.post("/runs/{key}/replay")
    async def replay(
        run: Run, shown: All, letters: Letters, authorization: Annotated[str, Header()] = ""
    ) -> dict[str, Any]:
        """Admit rows again that were given up: for operators."""
        shown.admission.check_operator(run.key, authorization)
        asked = shown.live.replay(run.directory, letters.stage, letters.outcome, letters.reason)

        async def rows() -> dict[str, Any]:
            return {"rows": await asked}

        return await _answer(rows())


async def _answer(question: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The answer, or one line on why there is none: a service that is away is no failure of the page."""
    try:
        return {**await question, "problem": ""}
    except (MeshError, OSError) as error:
        return {"problem": " ".join(str(error).split())}


def _add_timeline(router: APIRouter) -> None:
    """Add the route of one step over time."""

    @router.get("/runs/{key}/timeline")
    def timeline(run: Run, step: int | None = None) -> dict[str, Any]:
        """One step's timeline; by default the newest step with spans."""
        files = SpanFiles(run.directory)
        steps = files.steps()
        bounds = {"first": steps[0], "last": steps[-1]} if steps else {}
        if not steps:
            return {"lanes": [], **bounds, "problem": files.problem or "no step was traced yet"}
        try:
            found = files.timeline(steps[-1] if step is None else step)
        except NotFoundError as error:
            return {"lanes": [], **bounds, "step": step, "problem": str(error)}
        return {**found, **bounds, "problem": files.problem}


def _add_settings(router: APIRouter) -> None:
    """Add the route of the configuration."""

    @router.get("/runs/{key}/config")
    def config(run: Run, shown: All, other: str = "") -> dict[str, Any]:
        beside = shown.run(other).directory if other else None
        try:
            return {"entries": settings.compared(run.directory, beside), "problem": ""}
        except UserError as error:
            return {"entries": [], "problem": str(error)}


def _add_rows(router: APIRouter) -> None:
    """Add routes of the rollouts."""

    @router.get("/runs/{key}/steps")
    def steps(run: Run) -> dict[str, Any]:
        return _told(lambda rows: {"files": rows.steps_of(run.directory)}, files=[])

    @router.get("/runs/{key}/rows/{split}/{step}")
    def page(
        run: Run,
        split: Split,
        step: int,
        sort: str = "",
        descending: bool = False,
        where: str = "",
        search: str = "",
        grouped: bool = False,
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 50,
    ) -> dict[str, Any]:
        def ask(rows: ModuleType) -> dict[str, Any]:
            question = rows.RowQuery(
                sort=sort,
                descending=descending,
                where=where,
                search=search,
                offset=offset,
                limit=limit,
            )
            found = rows.groups_of if grouped else rows.page_of
            answer: dict[str, Any] = found(run.directory, split, step, question)
            return answer

        return _told(ask, rows=0, matching=0, columns=[], page=[])

    @router.get("/runs/{key}/rows/{split}/{step}/{number}")
    def row(run: Run, split: Split, step: int, number: int) -> dict[str, Any]:
        return _told(
            lambda rows: {"row": rows.row_of(run.directory, split, step, number)}, row=None
        )


def _told(ask: Callable[[ModuleType], dict[str, Any]], **nothing: Any) -> dict[str, Any]:
    """The answer of the module `rows`, or `nothing` and one line on why."""
    try:
        # Imported here: it needs pyarrow, which the other views do without.
        from meshrl.http.view import rows
    except ImportError as error:
        why = f"rollouts are read with pyarrow: pip install 'meshrl[torch]' ({error})"
        return {**nothing, "problem": why}
    try:
        return {**ask(rows), "problem": ""}
    except (UserError, NotFoundError) as error:
        return {**nothing, "problem": str(error)}

"""The HTTP app of the reward registry: FastAPI, OpenAPI at /openapi.json, pages at /docs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.responses import PlainTextResponse, Response
from typing_extensions import override

from meshrl.http.body_limit import BodyLimit
from meshrl.http.responses import AsciiJSON
from meshrl.http.rewards import models as m
from meshrl.http.rewards import submission
from meshrl.http.rewards.errors import install, problem
from meshrl.http.server import address_of, certificate_names
from meshrl.rewardd.registry.registry import Registry
from meshrl.rpc.guarded_registry import Caller, GuardedRegistry

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/problem+json": {}}}
    for status, text in {
        400: "the request cannot be parsed",
        401: "no credential or token",
        403: "the role may not do this",
        404: "no such name or version",
        409: "conflicts with the present state",
        413: "too large",
        422: "wrong input: one line says what and where",
        429: "too many requests, or no room",
    }.items()
}
METHODS: Mapping[str, Callable[..., Any]] = {
    "submit_reward": Registry.submit,
    "list_rewards": Registry.listing,
    "get_reward": Registry.name,
    "get_version": Registry.version,
    "diff_rewards": Registry.diff,
    "roll_back": Registry.roll_back,
    "retire": Registry.retire,
    "score": Registry.score,
    "compare": Registry.compare,
}
"""What each route calls, by the name of its function."""
_bearer = HTTPBearer(
    auto_error=False, description="A credential of the run, or a token of the tokens file."
)


def _caller(
    request: Request,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)] = None,  # for OpenAPI
) -> Caller:
    return Caller(
        authorization=request.headers.get("authorization", ""),
        peer=address_of(request),
        transport="http",
        names=certificate_names(request),
    )


Who = Annotated[Caller, Depends(_caller)]


class _CheckedRoute(APIRoute):
    """Refuses a caller before a byte of the body is read."""

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        method = METHODS[self.name]

        async def checked(request: Request) -> Response:
            registry: GuardedRegistry = request.app.state.registry
            registry.check(_caller(request), method, request.path_params.get("name", ""))
            return await handle(request)

        return checked


def build_app(registry: GuardedRegistry, max_body_bytes: int) -> FastAPI:
    """The app; `max_body_bytes` bounds every request."""
    app = FastAPI(
        title="meshrl reward registry",
        version="1",
        description="Reward functions submitted to a running mesh.",
        default_response_class=AsciiJSON,
    )
    app.add_middleware(BodyLimit, limit=max_body_bytes, refuse=problem)
    install(app)

    @app.get("/health", tags=["service"])
    async def health() -> m.HealthModel:
        """Whether the service is up."""
        return m.HealthModel(status="serving", scoring=registry.scoring)

    app.state.registry = registry
    router = APIRouter(
        prefix="/v1/rewards", tags=["rewards"], responses=PROBLEMS, route_class=_CheckedRoute
    )
    for add in (_add_versions, _add_changes, _add_trials):
        add(router, registry)
    app.include_router(router)
    submission.declare(app)
    return app


def _add_versions(router: APIRouter, registry: GuardedRegistry) -> None:
    """Routes that submit and read versions."""

    @router.post("", status_code=201, openapi_extra=submission.CONTENT)
    async def submit_reward(request: Request, who: Who) -> m.AcceptedModel:
        """Accept a version and point its name to it."""
        body = await submission.read(request)
        accepted = await registry.change(who, Registry.submit, body.submission())
        return m.AcceptedModel(
            hash=accepted.manifest.hash,
            created=accepted.created,
            tests=accepted.cases,
            name=m.NameModel.of(accepted.name),
        )

    @router.get("")
    async def list_rewards(who: Who) -> m.ListModel:
        """Every name, and what scores the run."""
        listing = registry.read(who, Registry.listing)
        return m.ListModel(
            names=[m.NameModel.of(name) for name in listing.names],
            followed=listing.followed,
            scoring=listing.scoring,
            base=listing.base,
        )

    @router.get("/{name}")
    async def get_reward(name: str, who: Who) -> m.NameModel:
        """One name with its history."""
        return m.NameModel.of(registry.read(who, Registry.name, name))

    @router.get("/{name}/versions/{version}")
    async def get_version(name: str, version: str, who: Who) -> m.VersionModel:
        """One version with its source; `current` is the current one."""
        wanted = "" if version == "current" else version
        return m.VersionModel.of(*registry.read(who, Registry.version, name, wanted))

    @router.get("/{name}/diff", response_class=PlainTextResponse)
    async def diff_rewards(
        name: str, who: Who, old: Annotated[str, Query()], new: Annotated[str, Query()] = ""
    ) -> PlainTextResponse:
        """A unified diff of two sources."""
        text = registry.read(who, Registry.diff, name, old, new)
        return PlainTextResponse(text.encode(errors="replace"))


def _add_changes(router: APIRouter, registry: GuardedRegistry) -> None:
    """Routes that change which version a name points to."""

    @router.post("/{name}/rollback")
    async def roll_back(name: str, body: m.VersionBody, who: Who) -> m.NameModel:
        """Point the name to `version`, or to the one before the current one."""
        return m.NameModel.of(await registry.change(who, Registry.roll_back, name, body.version))

    @router.post("/{name}/retire")
    async def retire(name: str, body: m.VersionBody, who: Who) -> m.NameModel:
        """Forbid a version to score under this name."""
        return m.NameModel.of(await registry.change(who, Registry.retire, name, body.version))


def _add_trials(router: APIRouter, registry: GuardedRegistry) -> None:
    """Routes that score samples with any version; the scores do not enter a run."""

    @router.post("/{name}/score")
    async def score(name: str, body: m.ScoreBody, who: Who) -> list[m.ScoreModel]:
        """Score samples with a version; the scores do not enter a run."""
        samples = [one.sample(number) for number, one in enumerate(body.samples)]
        scores = await registry.read(who, Registry.score, name, body.version, samples)
        return [m.ScoreModel.of(score) for score in scores]

    @router.post("/{name}/compare")
    async def compare(name: str, body: m.CompareBody, who: Who) -> m.DifferencesModel:
        """Two versions on the same samples."""
        samples = [one.sample(number) for number, one in enumerate(body.samples)]
        differences = await registry.read(who, Registry.compare, name, body.a, body.b, samples)
        return m.DifferencesModel.of(differences)

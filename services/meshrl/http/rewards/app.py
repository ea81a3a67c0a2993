"""The HTTP app of the reward registry: FastAPI, OpenAPI at /openapi.json, pages at /docs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.responses import PlainTextResponse, Response
from typing_extensions import override

from meshrl.http.common import AsciiJSON, BodyLimit, install, presented_by, problem
from meshrl.http.rewards import models as m
from meshrl.rewardd.registry.registry import Registry
from meshrl.rpc.audit_log import AuditedChanges
from meshrl.rpc.identity import CALLER, Identity

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
METHODS: Mapping[str, str] = {
    "submit_reward": "SubmitReward",
    "list_rewards": "ListRewards",
    "get_reward": "GetReward",
    "get_version": "GetReward",
    "diff_rewards": "DiffRewards",
    "roll_back": "RollBackReward",
    "retire": "RetireReward",
    "score": "TryReward",
    "compare": "CompareRewards",
}
"""The method of gRPC that does the same, and asks for the same roles, by the name of a route's function."""
_bearer = HTTPBearer(
    auto_error=False, description="A credential of the run, or a token of the tokens file."
)


class _AdmittingRoute(APIRoute):
    """Admits a caller before a byte of the body is read."""

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        method = f"/meshrl.v1.RewardRegistry/{METHODS[self.name]}"

        async def admitted(request: Request) -> Response:
            identity: Identity = request.app.state.identity
            subject = request.path_params.get("name", "")
            CALLER.set(identity.admit(method, presented_by(request, subject)))
            return await handle(request)

        return admitted


def build_app(
    registry: Registry, changes: AuditedChanges, identity: Identity, max_body_bytes: int
) -> FastAPI:
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
    async def health() -> dict[str, str]:
        """Whether the service is up, and the version that scores."""
        return {"status": "serving", "scoring": registry.judge.reward_hash}

    app.state.identity = identity
    router = APIRouter(
        prefix="/v1/rewards",
        tags=["rewards"],
        responses=PROBLEMS,
        route_class=_AdmittingRoute,
        dependencies=[Depends(_bearer)],  # for OpenAPI
    )
    _add_versions(router, registry)
    _add_changes(router, changes)
    _add_trials(router, registry)
    app.include_router(router)
    return app


def _add_versions(router: APIRouter, registry: Registry) -> None:
    """Add routes that read versions."""

    @router.get("")
    async def list_rewards() -> m.ListModel:
        """Every name, and what scores the run."""
        return m.ListModel.of(registry.listing())

    @router.get("/{name}")
    async def get_reward(name: str) -> m.NameModel:
        """One name with its history."""
        return m.NameModel.of(registry.name(name))

    @router.get("/{name}/versions/{version}")
    async def get_version(name: str, version: str) -> m.VersionModel:
        """One version with its source; `current` is the current one."""
        wanted = "" if version == "current" else version
        return m.VersionModel.of(*registry.version(name, wanted))

    @router.get("/{name}/diff", response_class=PlainTextResponse)
    async def diff_rewards(
        name: str, old: Annotated[str, Query()], new: Annotated[str, Query()] = ""
    ) -> PlainTextResponse:
        """A unified diff of two sources."""
        text = registry.diff(name, old, new)
        return PlainTextResponse(text.encode(errors="replace"))


def _add_changes(router: APIRouter, changes: AuditedChanges) -> None:
    """Add routes that submit versions and change the version of a name."""

    @router.post("", status_code=201)
    async def submit_reward(body: m.SubmitBody) -> m.AcceptedModel:
        """Accept a version and point its name to it."""
        accepted = await changes.submit(body.submission())
        return m.AcceptedModel(
            hash=accepted.manifest.hash,
            created=accepted.created,
            tests=accepted.cases,
            name=m.NameModel.of(accepted.name),
        )

    @router.post("/{name}/rollback")
    async def roll_back(name: str, body: m.VersionBody) -> m.NameModel:
        """Point the name to `version`, or to the one before the current one."""
        return m.NameModel.of(await changes.roll_back(name, body.version))

    @router.post("/{name}/retire")
    async def retire(name: str, body: m.VersionBody) -> m.NameModel:
        """Forbid a version to score under this name."""
        return m.NameModel.of(await changes.retire(name, body.version))


def _add_trials(router: APIRouter, registry: Registry) -> None:
    """Add routes that score samples with any version; the scores do not enter a run."""

    @router.post("/{name}/score")
    async def score(name: str, body: m.ScoreBody) -> list[m.ScoreModel]:
        """Score samples with a version; the scores do not enter a run."""
        samples = [one.sample(number) for number, one in enumerate(body.samples)]
        scores = await registry.score(name, body.version, samples)
        return [m.ScoreModel.of(score) for score in scores]

    @router.post("/{name}/compare")
    async def compare(name: str, body: m.CompareBody) -> m.DifferencesModel:
        """Two versions on the same samples."""
        samples = [one.sample(number) for number, one in enumerate(body.samples)]
        differences = await registry.compare(name, body.a, body.b, samples)
        return m.DifferencesModel.of(differences)

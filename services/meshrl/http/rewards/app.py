"""The HTTP app of the reward registry: FastAPI, OpenAPI at /openapi.json, pages at /docs."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.responses import PlainTextResponse, Response
from typing_extensions import override

from meshrl.contract.errors import UserError
from meshrl.http.common import AsciiJSON, BodyLimit, install, presented_by, problem
from meshrl.http.rewards import models as m
from meshrl.rewardd.pool.signatures import FunctionKind
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
    async def health() -> m.HealthModel:
        """Whether the service is up."""
        return m.HealthModel(status="serving", scoring=registry.judge.reward_hash)

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
    _declare(app)
    return app


def _add_versions(router: APIRouter, registry: Registry) -> None:
    """Routes that read versions."""

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
    """Routes that submit versions, and change which one a name points to."""

    @router.post("", status_code=201, openapi_extra=SUBMISSION)
    async def submit_reward(request: Request) -> m.AcceptedModel:
        """Accept a version and point its name to it."""
        body = await _read(request)
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
    """Routes that score samples with any version; the scores do not enter a run."""

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


MAX_FORM_FIELDS = 32
SUBMISSION = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/SubmitBody"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["name", "file"],
                    "properties": {
                        "name": {"type": "string"},
                        "file": {"type": "string", "format": "binary"},
                        "entry_point": {"type": "string"},
                        "kind": {"type": "string", "enum": [k.value for k in FunctionKind]},
                        "deps": {"type": "string", "description": "separated by commas"},
                        "tests": {"type": "string", "description": "a JSON list"},
                        "limits": {"type": "string", "description": "a JSON object"},
                        "note": {"type": "string"},
                        "hold": {"type": "string", "enum": ["true", "false"]},
                    },
                }
            },
        },
    }
}


def _declare(app: FastAPI) -> None:
    """Add the body to the OpenAPI document: FastAPI does not know it, because the handler reads it itself."""
    model = m.SubmitBody
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        if model.__name__ not in schemas:
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[model.__name__] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's own way of extending the document


async def _read(request: Request) -> m.SubmitBody:
    """A submission. Raises UserError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        async with request.form(max_files=1, max_fields=MAX_FORM_FIELDS) as form:
            return _validated(await _fields(form))
    if kind != "application/json":
        raise UserError(f"content type {kind[:80]!r}: want application/json or multipart/form-data")
    try:
        fields = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is not JSON: {error}") from error
    return _validated(fields)


def _validated(fields: Any) -> m.SubmitBody:
    try:
        return m.SubmitBody.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise UserError(f"{where}: {first['msg']}") from error


async def _fields(form: FormData) -> Mapping[str, Any]:
    """The form's fields as in the JSON body: `file` is the source, or a wheel if its name ends with .whl."""
    fields: dict[str, Any] = {}
    for key, value in form.multi_items():
        if key in fields or (key == "file") != isinstance(value, UploadFile):
            raise UserError(
                f"form field {key[:40]!r}: want it once, `file` as a file and the others as text"
            )
        fields[key] = value
    upload = fields.pop("file", None)
    if upload is None:
        raise UserError("the form has no file")
    data = await upload.read()
    fields |= m.wheel_or_source(upload.filename or "", data)
    if "deps" in fields:
        fields["deps"] = [dep for dep in fields["deps"].split(",") if dep.strip()]
    for key in {"tests", "limits"} & fields.keys():
        try:
            fields[key] = json.loads(fields[key])
        except (ValueError, RecursionError) as error:
            raise UserError(f"{key} is not JSON: {error}") from error
    return fields

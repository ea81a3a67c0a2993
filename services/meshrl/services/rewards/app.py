"""The HTTP door of the registry: FastAPI, OpenAPI at /openapi.json, pages at /docs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.responses import PlainTextResponse

from meshrl.contract.errors import UserError
from meshrl.rewardd.kinds import Kind
from meshrl.services.rewards import models as m
from meshrl.services.rewards.desk import Caller, RewardDesk
from meshrl.services.rewards.limit import BodyLimit
from meshrl.services.rewards.problems import AsciiJSON, install

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/problem+json": {}}}
    for status, text in {
        400: "not a request that can be read",
        401: "no token",
        403: "no such role",
        404: "no such name or version",
        409: "at odds with what is there",
        413: "too large",
        422: "wrong input: one line says what and where",
        429: "too often, or no room",
    }.items()
}
MAX_FORM_FIELDS = 32
SUBMIT_CONTENT = {
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
                        "kind": {"type": "string", "enum": [k.value for k in Kind]},
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


_bearer = HTTPBearer(auto_error=False, description="A token of the tokens file.")


def _caller(
    request: Request, token: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    return Caller(
        authorization=f"{token.scheme} {token.credentials}" if token else "",
        peer=request.client.host if request.client else "unknown",
        door="http",
    )


Who = Annotated[Caller, Depends(_caller)]


def build_app(desk: RewardDesk, max_body_bytes: int) -> FastAPI:
    """The app; `max_body_bytes` bounds every request."""
    app = FastAPI(
        title="meshrl reward registry",
        version="1",
        description="Reward functions submitted to a running mesh.",
        default_response_class=AsciiJSON,
    )
    app.add_middleware(BodyLimit, limit=max_body_bytes)
    install(app)

    @app.get("/health", tags=["service"])
    async def health() -> m.HealthModel:
        """Whether the service is up."""
        return m.HealthModel(status="serving", scoring=desk.scoring)

    @app.post(
        "/v1/rewards",
        status_code=201,
        responses=PROBLEMS,
        openapi_extra=SUBMIT_CONTENT,
        tags=["rewards"],
    )
    async def submit_reward(request: Request, who: Who) -> m.AcceptedModel:
        """Accept a version and point its name to it."""
        desk.expect(who)
        body = await _submission(request)
        accepted = await desk.submit(who, body.submission())
        return m.AcceptedModel(
            hash=accepted.manifest.hash,
            created=accepted.created,
            tests=accepted.cases,
            name=m.NameModel.of(accepted.name),
        )

    @app.get("/v1/rewards", responses=PROBLEMS, tags=["rewards"])
    async def list_rewards(who: Who) -> m.ListModel:
        """Every name, and what scores the run."""
        found = desk.list(who)
        return m.ListModel(
            names=[m.NameModel.of(name) for name in found.names],
            followed=found.followed,
            scoring=found.scoring,
            base=found.base,
            watch=m.DifferencesModel.of(found.watch) if found.watch else None,
        )

    @app.get("/v1/rewards/{name}", responses=PROBLEMS, tags=["rewards"])
    async def get_reward(name: str, who: Who) -> m.NameModel:
        """One name with its history."""
        return m.NameModel.of(desk.name(who, name))

    @app.get("/v1/rewards/{name}/versions/{version}", responses=PROBLEMS, tags=["rewards"])
    async def get_version(name: str, version: str, who: Who) -> m.VersionModel:
        """One version with its source; `current` is the current one."""
        manifest, content, cases = desk.version(who, name, "" if version == "current" else version)
        return m.VersionModel.of(manifest, content, tuple(cases))

    @app.get(
        "/v1/rewards/{name}/diff",
        response_class=PlainTextResponse,
        responses=PROBLEMS,
        tags=["rewards"],
    )
    async def diff_rewards(
        name: str, who: Who, old: Annotated[str, Query()], new: Annotated[str, Query()] = ""
    ) -> PlainTextResponse:
        """A unified diff of two sources."""
        return PlainTextResponse(desk.diff(who, name, old, new).encode(errors="replace"))

    @app.post("/v1/rewards/{name}/rollback", responses=PROBLEMS, tags=["rewards"])
    async def roll_back(name: str, body: m.VersionBody, who: Who) -> m.NameModel:
        """Point the name to `version`, or to the one before the current one."""
        return m.NameModel.of(await desk.roll_back(who, name, body.version))

    @app.post("/v1/rewards/{name}/retire", responses=PROBLEMS, tags=["rewards"])
    async def retire(name: str, body: m.VersionBody, who: Who) -> m.NameModel:
        """Bar a version from scoring under this name."""
        return m.NameModel.of(await desk.retire(who, name, body.version))

    @app.post("/v1/rewards/{name}/watch", responses=PROBLEMS, tags=["rewards"])
    async def watch(name: str, body: m.WatchBody, who: Who) -> m.NameModel:
        """Score a share of the run's rows with a further version and compare (canary, shadow)."""
        return m.NameModel.of(await desk.watch(who, name, body.version, body.share))

    @app.post("/v1/rewards/{name}/score", responses=PROBLEMS, tags=["rewards"])
    async def score(name: str, body: m.ScoreBody, who: Who) -> list[m.ScoreModel]:
        """Try a version out; nothing of it enters a run."""
        samples = [one.sample(number) for number, one in enumerate(body.samples)]
        return [m.ScoreModel.of(s) for s in await desk.score(who, name, body.version, samples)]

    @app.post("/v1/rewards/{name}/compare", responses=PROBLEMS, tags=["rewards"])
    async def compare(name: str, body: m.CompareBody, who: Who) -> m.DifferencesModel:
        """Two versions on the same samples."""
        samples = [one.sample(number) for number, one in enumerate(body.samples)]
        return m.DifferencesModel.of(await desk.compare(who, name, body.a, body.b, samples))

    _declare(app, m.SubmitBody)
    return app


def _declare(app: FastAPI, model: type[m.SubmitBody]) -> None:
    """Put a body that a handler reads by itself into the OpenAPI document."""
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


async def _submission(request: Request) -> m.SubmitBody:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        async with request.form(max_files=1, max_fields=MAX_FORM_FIELDS) as form:
            return _validated(await _fields(form))
    if kind not in ("application/json", ""):
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
    """A form as the JSON body would be: `file` is the source, or a wheel by its name."""
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

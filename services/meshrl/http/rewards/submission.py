"""Reads a submission from an HTTP request: JSON, or a form with a file; and its part of the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from meshrl.contract.errors import UserError
from meshrl.http.rewards import models as m
from meshrl.rewardd.pool.signatures import FunctionKind

MAX_FORM_FIELDS = 32
CONTENT = {
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


def declare(app: FastAPI) -> None:
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


async def read(request: Request) -> m.SubmitBody:
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

"""One conversation with a SGLang server: what it answers, as far as an answer does not depend on the model."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx

SAMPLING = {"max_new_tokens": 3, "temperature": 1.0, "ignore_eos": True}
COLD = {**SAMPLING, "temperature": -1.0}
ASKED = {"input_ids": [1, 2, 3, 4], "sampling_params": SAMPLING, "return_logprob": True}
STEPS: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/model_info", None),
    ("GET", "/v1/models", None),
    ("POST", "/generate", {**ASKED, "rid": "talk-1", "stream": True}),
    ("POST", "/generate", {**ASKED, "rid": "talk-2", "stream": False}),
    ("POST", "/generate", {**ASKED, "rid": "talk-3", "stream": True, "sampling_params": COLD}),
    ("POST", "/abort_request", {"rid": "nobody"}),
    ("POST", "/pause_generation", {"mode": "in_place"}),
    ("POST", "/continue_generation", {"torch_empty_cache": False}),
    ("POST", "/begin_weight_update", {}),
    ("POST", "/begin_weight_update", {}),
    ("POST", "/end_weight_update", {}),
    ("POST", "/end_weight_update", {}),
    ("POST", "/flush_cache", {}),
)  # fmt: skip


async def hold(url: str, key: str) -> list[dict[str, Any]]:
    """Status and shape of each answer, in order: types instead of values, but for texts of what was refused."""
    found = []
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as http:
        for method, route, body in STEPS:
            answer = await http.request(method, route, json=body, headers=headers)
            found.append({"route": route, "status": answer.status_code, **_said(answer)})
    return found


def _said(answer: httpx.Response) -> dict[str, Any]:
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        lines = [each.removeprefix("data: ") for each in answer.text.splitlines() if each]
        events = [json.loads(each) for each in lines if each != "[DONE]"]
        return {"kind": kind, "ends": lines[-1] == "[DONE]", "last": shape(events[-1])}
    if kind == "application/json":
        return {"kind": kind, "answer": shape(answer.json())}
    return {"kind": kind}


def shape(value: Any, name: str = "") -> Any:
    """Types for values; refusals say what they say, without numbers."""
    if isinstance(value, dict):
        return {key: shape(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if name in ("message", "code", "retryable") and isinstance(value, str | int):
        return re.sub(r"\d+", "N", value) if isinstance(value, str) else value
    return "number" if isinstance(value, int | float) else type(value).__name__


def differences(ours: Any, theirs: Any, where: str) -> list[str]:
    """Values and keys of the fake that SGLang's answer has otherwise, or not at all."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = [f"{where}.{key}: SGLang has no such key" for key in ours if key not in theirs]
        both = [key for key in ours if key in theirs]
        return found + [d for key in both for d in differences(ours[key], theirs[key], f"{where}.{key}")]  # fmt: skip
    if isinstance(ours, list) and isinstance(theirs, list):
        return differences(ours[0], theirs[0], f"{where}[]") if ours and theirs else []
    return [] if ours == theirs else [f"{where}: {ours!r}, SGLang {theirs!r}"]

"""verl's files of tools, as tools of the program `tools`: search services, code sandboxes and MCP servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrl.common.plugins import known
from meshrl.config.loading import read_yaml
from meshrl.contract.errors import ConfigError
from meshrl.rollout.tools.ports import FORMATS
from meshrl.verl.rules import Conversion, Given, KeyStatus, configured, expanded, no

PROGRAM_OPTIONS = "rollout.program_options"
OPTIONS = f"{PROGRAM_OPTIONS}.tools"
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
FILES = ("tool_config_path", "function_tool_path")
OWN = "name your functions or MCP servers in rollout.program_options: docs/how-to/tools.md"


@configured
def tool_files(name: str, value: Any, given: Given) -> Conversion:
    """`tool_config_path`, a YAML of tool classes, or `function_tool_path`, a Python file."""
    if not value:
        return Conversion(note="none")
    path = Path(expanded(value))
    if name == "function_tool_path":
        return no(f"name each function of it: {OPTIONS}=['{path}:function', ...]")
    if not path.is_file():
        return no(f"{path} is not on this machine, so its tools are not known: {OWN}")
    try:
        tools = [_tool(entry, path) for entry in read_yaml(path)[0].get("tools") or []]
    except ConfigError as error:
        return no(f"{error}: {OWN}")
    found = [tool for several in tools for tool in several]
    if not found:
        return no(f"{path} has no tools: {OWN}")
    return Conversion(
        settings={"rollout.program": "tools", OPTIONS: found}, note=f"the tools of {path}"
    )


def multi_turn(value: Any, given: Given) -> Conversion:
    """Turns with tools."""
    if not value:
        return Conversion(note="one turn")
    if not _has_tools(given):
        return no(f"rollout.program=tools; {OWN}")
    return Conversion(settings={"rollout.program": "tools"})


@configured
def agent_loop(others: str, value: Any, given: Given) -> Conversion:
    """The loop of rows that name none; with `tool_agent` there are turns with tools whatever `multi_turn` says."""
    if value in (None, "single_turn_agent"):
        return Conversion(note="one turn")
    if value != "tool_agent":
        return no(others)
    if not _has_tools(given):
        return Conversion(note="multi_turn names no tools: one turn")
    return Conversion(settings={"rollout.program": "tools"})


def _is_on(given: Given) -> bool:
    loop = given.get("actor_rollout_ref.rollout.agent.default_agent_loop", None)
    return bool(given.get(f"{MULTI_TURN}.enable", False)) or loop == "tool_agent"


@configured
def of_tools(ours: str, value: Any, given: Given) -> Conversion:
    """An option of the program `tools`."""
    if not _is_on(given):
        return Conversion(status=KeyStatus.IGNORED, note="multi_turn.enable is off")
    if not _has_tools(given):
        return no(f"{PROGRAM_OPTIONS}.{ours}, once there are tools")
    return Conversion(settings={} if value is None else {f"{PROGRAM_OPTIONS}.{ours}": value})


def tool_format(value: Any, given: Given) -> Conversion:
    """How the policy writes a call."""
    if value not in known(FORMATS) and _is_on(given):
        return no(
            f"there is no format {value!r} ({', '.join(known(FORMATS))}): docs/how-to/extend.md"
        )
    return of_tools("format")(value, given)


def tool_result(value: Any, given: Given) -> Conversion:
    """Characters in verl, tokens here: four characters are about one."""
    answer = of_tools("max_result_tokens")(max(1, int(value) // 4), given)
    return replace(answer, note=answer.note or f"{value} characters, four a token")


def _has_tools(given: Given) -> bool:
    """Do the files of tools become tools?"""
    return any(
        tool_files(name)(given.get(f"{at}.{name}", None), given).settings
        for at in (MULTI_TURN, "data")
        for name in FILES
    )


def _tool(entry: Any, path: Path) -> list[dict[str, Any]]:
    """The tools of one entry; raises ConfigError for a class that only verl can run."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: {entry!r} is not a tool")
    settings = entry.get("config") or {}
    kind = str(entry.get("class_name", "")).rpartition(".")[2]
    function = (entry.get("tool_schema") or {}).get("function") or {}
    named = {"name": function["name"]} if function.get("name") else {}
    if settings.get("type") == "mcp":
        return _servers(settings, entry.get("mcp") or {}, path)
    if url := settings.get("retrieval_service_url"):
        tool = {"search": {"url": url, "top_k": settings.get("topk", 3)}, **named}
        return [_timed(tool, settings.get("timeout"))]
    if kind.endswith("SandboxFusionTool"):
        return [_timed({"python": {}, **named}, settings.get("default_timeout"))]
    raise ConfigError(
        f"{path}: {kind or entry!r} is a class of verl's tools, which are functions here"
    )


def _timed(tool: dict[str, Any], seconds: Any) -> dict[str, Any]:
    return tool if seconds is None else {**tool, "timeout_s": float(seconds)}


def _servers(
    settings: Mapping[str, Any], selected: Mapping[str, Any], path: Path
) -> list[dict[str, Any]]:
    file = Path(
        str(selected.get("mcp_servers_config_path") or settings.get("mcp_servers_config_path"))
    )
    try:
        servers = json.loads(file.read_text(encoding="utf-8-sig"))["mcpServers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: the MCP servers of {file} cannot be read ({error})") from error
    only = selected.get("tool_selected_list") or []
    found = []
    for name, server in servers.items():
        if server.get("command"):
            tool: dict[str, Any] = {"command": [server["command"], *server.get("args", [])]}
        elif server.get("url"):
            tool = {"url": server["url"]}
        else:
            raise ConfigError(f"{file}: {name} has neither a command nor a url")
        if token := server.get("auth_token"):
            tool["headers"] = {"Authorization": f"Bearer {token}"}
        found.append(_timed({**tool, "only": only} if only else tool, settings.get("timeout")))
    return found

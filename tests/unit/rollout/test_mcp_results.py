"""What the policy reads of results of MCP servers, and what the log has of their noise."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from mcp.client import stdio
from mcp_types import CallToolResult

from meshrl.rollout.tools.mcp_servers import text_of

FILE = {"uri": "file:///a.txt", "mimeType": "text/plain"}


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "text", "text": ""}], ""),
        ([{"type": "resource", "resource": {**FILE, "text": "of the file"}}], "of the file"),
        ([{"type": "resource", "resource": {**FILE, "text": ""}}], ""),
        ([{"type": "resource", "resource": {**FILE, "blob": "aGk="}}], "[resource file:///a.txt]"),
        (
            [{"type": "resource_link", "uri": "file:///a.txt", "name": "a"}],
            "[resource_link a: file:///a.txt]",
        ),
        ([{"type": "image", "data": "aGk=", "mimeType": "image/png"}], "[image]"),
        ([{"type": "audio", "data": "aGk=", "mimeType": "audio/wav"}], "[audio]"),
        ([], ""),
    ],
)
def test_a_result_is_the_texts_in_it(parts: list[dict[str, Any]], text: str) -> None:
    assert text_of(CallToolResult.model_validate({"content": parts})) == text


def test_structured_content_is_shown_where_there_is_nothing_else() -> None:
    result = {"content": [], "structuredContent": {"answer": 42}}
    assert text_of(CallToolResult.model_validate(result)) == '{"answer": 42}'


def test_noise_on_stdout_of_a_server_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(stdio._parse_line("Server started on stdio"), Exception)
    (record,) = caplog.records
    assert record.exc_info is None
    assert "\n" not in record.getMessage() and "Server started on stdio" in record.getMessage()

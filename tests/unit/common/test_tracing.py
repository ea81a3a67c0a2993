from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshrl.common import tracing
from meshrl.contract.stage_worker import Intake, StageResult, StageWorker
from meshrl.contract.types import ROLLOUT_STAGE, LeasedRow, Uid, Version
from meshrl.http.view.metrics import SpanFiles
from meshrl.testing.contract.queue_actors import Actors, rollout_of, spec, tasks
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore
from tests.doubles.collector import collector, parsed

from ...waiting import until

ROW = Uid("r", "0-1", 2)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / tracing.FOLDER
    tracing.stop()


def written(folder: Path, service: str = "s") -> list[dict[str, Any]]:
    tracing.stop()
    path = folder / f"{service}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_spans_of_a_row_are_one_trace_whoever_writes_them(folder: Path) -> None:
    tracing.start(folder, "feeder", 1.0)
    tracing.record_rows("admit", [ROW], 1, root=True)
    (root,) = written(folder, "feeder")
    tracing.start(folder, "rollout-0", 1.0)
    with tracing.row_span("rollout", ROW, delivery=1), tracing.span("generate", turn=0) as inner:
        assert inner is not None
        inner.attributes["tokens"] = 7
    generate, rollout = written(folder, "rollout-0")
    assert {one["trace"] for one in (root, rollout, generate)} == {root["trace"]}
    assert (root["parent"], rollout["parent"]) == ("", root["span"])
    assert generate["parent"] == rollout["span"]
    assert generate["attributes"] == {"turn": 0, "tokens": 7}
    assert rollout["start_ns"] <= generate["start_ns"] <= generate["end_ns"] <= rollout["end_ns"]
    found = SpanFiles(folder.parent).row(Uid("r", "0-1", 2, attempt=3))
    assert [one["name"] for one in found] == ["admit", "rollout", "generate"]


def test_a_share_keeps_whole_groups_and_the_same_ones_everywhere(folder: Path) -> None:
    uids = [Uid("r", f"0-{task}", index) for task in range(200) for index in range(2)]
    kept = []
    for _ in range(2):
        tracer = tracing.Tracer(folder / "x.jsonl", "x", 0.25)
        kept.append([uid for uid in uids if tracer.samples(uid)])
        tracer.close()
    tasks = {uid.task for uid in kept[0]}
    assert kept[0] == kept[1] and len(kept[0]) == 2 * len(tasks)
    assert 20 < len(tasks) < 80


def test_without_tracing_nothing_is_written_and_calls_carry_nothing(folder: Path) -> None:
    tracing.start(folder, "s", 0.0)
    with tracing.row_span("rollout", ROW) as span, tracing.span("generate") as inner:
        assert span is None and inner is None
        assert tracing.metadata() == ()
    tracing.record_rows("learn", [ROW], 1)
    assert not tracing.is_on() and not folder.exists()


def test_a_call_carries_its_span_and_the_servicer_goes_on_in_it(folder: Path) -> None:
    tracing.start(folder, "s", 1.0)
    with tracing.row_span("reward", ROW) as span:
        assert span is not None
        ((name, header),) = tracing.metadata()
    assert name == "traceparent" and header == f"00-{span.trace_id}-{span.span_id}-01"
    with tracing.called("Reward/Score", header):
        pass
    for nonsense in (None, "", "00-1-2-3", "x" * 55):
        with tracing.called("Reward/Score", nonsense):
            assert tracing.metadata() == ()
    reward, call = written(folder)
    assert call["parent"] == reward["span"] and call["trace"] == reward["trace"]


def test_a_step_is_found_again_whatever_else_names_its_number(folder: Path) -> None:
    tracing.start(folder, "trainer", 1.0)
    tracing.record_step("training", "r", 1, 7, 1)
    tracing.record_step("step", "r", 1, 7, 1, root=True)
    tracing.record_rows("learn", [ROW], 1, step=77)
    tracing.stop()
    files = SpanFiles(folder.parent)
    assert files.steps() == [7]
    (lane,) = files.timeline(7)["lanes"]
    assert {span["name"] for span in lane["spans"]} == {"training", "learn"}


def test_a_step_that_was_made_again_is_shown_as_it_was_made_last(folder: Path) -> None:
    tracing.start(folder, "trainer", 1.0)
    for epoch, began, ended in ((1, 100, 140), (2, 900, 910)):
        tracer = tracing._tracer
        assert tracer is not None
        trace, root = tracing.step_trace("r", epoch, 7)
        tracer.end(tracing.Span("step", trace, root, "", began, ended, {"step": 7}))
        tracer.end(tracing.Span("training", trace, f"{epoch}", root, began, ended, {"step": 7}))
    tracing.stop()
    shown = SpanFiles(folder.parent).timeline(7)
    assert shown["seconds"] == 10 / 1e9
    (lane,) = shown["lanes"]
    assert len(lane["spans"]) == 1


def test_half_a_character_from_a_model_costs_no_span(folder: Path) -> None:
    tracing.start(folder, "s", 1.0)
    with tracing.row_span("rollout", ROW), tracing.span("tool", tool="\ud83d"):
        pass
    tool, rollout = written(folder)
    assert tool["attributes"] == {"tool": "\ud83d"} and rollout["name"] == "rollout"
    assert not SpanFiles(folder.parent).problem


def test_a_failure_is_told_in_its_span(folder: Path) -> None:
    tracing.start(folder, "s", 1.0)
    with pytest.raises(ValueError, match="no"), tracing.row_span("rollout", ROW):
        raise ValueError("no such thing")
    (span,) = written(folder)
    assert span["attributes"]["error"] == "ValueError: no such thing"


async def test_a_worker_tells_of_each_row_and_of_its_write(folder: Path) -> None:
    tracing.start(folder, "rollout-0", 1.0)
    queue = await TransferQueue.open(MemoryStore())
    actors = Actors(queue)
    await actors.start(spec(group_size=2, batch_groups=1))
    await actors.feed(tasks(1, group_size=2))

    async def handle(rows: Sequence[LeasedRow]) -> Sequence[StageResult]:
        with tracing.span("generate"):
            return [rollout_of(row, Version(1, 0)) for row in rows]

    worker = StageWorker(
        queue,
        ["run"],
        ROLLOUT_STAGE,
        handle,
        worker="w",
        intake=Intake(limit=2, version=lambda: Version(1, 0)),
    )
    working = asyncio.create_task(worker.run())
    await until(lambda: worker.stats.written >= 2)
    worker.drain()
    await working
    await queue.close()
    names = sorted(one["name"] for one in written(folder, "rollout-0"))
    assert names == ["generate", "generate", "rollout", "rollout", "write", "write"]


def test_a_collector_gets_the_spans_as_otlp_past_a_proxy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with collector() as (url, got):
        tracing.start(folder, "s", 1.0, otlp=url)
        with tracing.row_span("rollout", ROW, delivery=1):
            pass
        tracing.stop()
    (resource,) = got[0].resource_spans
    assert resource.resource.attributes[0].key == "service.name"
    assert resource.resource.attributes[0].value.string_value == "s"
    (span,) = resource.scope_spans[0].spans
    assert span.name == "rollout" and len(span.trace_id) == 16 and len(span.span_id) == 8
    assert ("meshrl.delivery", 1) in [(one.key, one.value.int_value) for one in span.attributes]


def test_opentelemetrys_own_parser_takes_what_a_collector_gets() -> None:
    """Field by field: it refuses names and types that its schema does not have."""
    given = {"a": 1, "b": 0.5, "c": "text", "d": True, "e": None}
    spans = [
        tracing.Span("learn", "ab" * 16, "cd" * 8, "", 10**18, 10**18 + 5, dict(given)),
        tracing.Span("write", "ab" * 16, "ef" * 8, "cd" * 8, 10**18, 10**18 + 7),
    ]
    (resource,) = parsed(tracing.otlp_message("trainer", spans)).resource_spans
    assert resource.resource.attributes[0].value.string_value == "trainer"
    learn, write = resource.scope_spans[0].spans
    assert learn.trace_id.hex() == write.trace_id.hex() == "ab" * 16
    assert (learn.parent_span_id, write.parent_span_id) == (b"", learn.span_id)
    assert write.end_time_unix_nano - write.start_time_unix_nano == 7
    kinds = [each.value.WhichOneof("value") for each in learn.attributes]
    assert kinds == ["int_value", "double_value", "string_value", "bool_value", "string_value"]


def test_a_full_disk_or_a_collector_that_is_away_costs_spans_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    tracer = tracing.Tracer(tmp_path / "file" / "s.jsonl", "s", 1.0, otlp="http://127.0.0.1:1/x")
    for _ in range(3):
        tracer.end(tracing.Span("a", "0" * 32, "1" * 16, "", 1))
    tracer.close()
    assert len(caplog.records) == 2


def test_a_long_file_is_moved_aside_once(tmp_path: Path) -> None:
    tracer = tracing.Tracer(tmp_path / "s.jsonl", "s", 1.0, max_bytes=100)
    tracer.end(tracing.Span("a", "0" * 32, "1" * 16, "", 1))
    tracer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["s.jsonl.1"]

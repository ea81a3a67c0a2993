"""Views of a running mesh show what the mesh reported."""

from __future__ import annotations

import errno
import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from meshrl.contract.types import (
    EngineStats,
    Ledger,
    TrainerPhase,
    TrainerStatus,
    Version,
    Waiting,
)
from meshrl.launcher.supervisor import ServiceState
from meshrl.launcher.text_console import MergedLog, text_console
from meshrl.launcher.view import (
    STUCK_S,
    MeshStatus,
    final_table,
    ledger_line,
    live_view,
    mean_staleness,
    sparkline,
    step_line,
    waiting_lines,
)
from meshrl.trainer.metrics.learning_signs import warnings_of

STATUS = TrainerStatus(
    step=12,
    total_steps=40,
    version=Version(1, 12),
    phase=TrainerPhase.TRAINING,
    reward_mean=0.5,
    held_out_score=0.61,
    tokens_per_s=1234.0,
    samples=3072,
    staleness={0: 200, 1: 56},
    eta_s=35.0,
)
LEDGER = Ledger(
    run="demo",
    admitted=4000,
    trained=3072,
    filtered={"zero_std": 100},
    stale={},
    dead_lettered={"timeout": 2},
    resident={"queued": 26, "leased": 800},
)


def mesh_status() -> MeshStatus:
    made = MeshStatus(
        run="demo",
        states={"rollout-0": ServiceState(phase="ready", restarts=1), "queue": ServiceState()},
    )
    made.see(replace(STATUS, step=11, reward_mean=0.25, held_out_score=0.12))
    made.see(STATUS)
    made.ledger = LEDGER
    return made


def drawn(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=False)
    console.print(renderable)
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


def test_the_view_shows_what_is_known() -> None:
    made = mesh_status()
    made.fleet["rollout-0"] = EngineStats(
        version=Version(1, 11),
        running=60,
        capacity=64,
        tokens_generated=9,
        tokens_per_s=2000.0,
        updates=11,
        update_pause_s=0.045,
    )
    text = drawn(live_view(made))
    for fact in (
        "step 12/40",
        "about 0:00:35 left",
        "held-out 0.610 (began at 0.120)",
        "1,234 tokens/s",
        "queued 26 · leased 800",
        "version 1.11 · 60/64 running · 2,000 tokens/s · 11 updates, last paused 45 ms · 1 restarts",
        "admitted 4,000 = trained 3,072 + filtered 100 + stale 0 + dead-lettered 2 + resident 826",
        "queue waiting",
    ):
        assert fact in text


def test_a_view_of_nothing_yet_shows_who_starts() -> None:
    made = MeshStatus(
        run="demo", states={"queue": ServiceState(phase="starting"), "trainer": ServiceState()}
    )
    text = drawn(live_view(made))
    assert "queue starting" in text and "trainer waiting" in text


def test_a_replica_that_does_not_answer_shows_its_phase() -> None:
    made = MeshStatus(
        run="demo", states={"rollout-0": ServiceState(phase="restarting", restarts=2)}
    )
    made.fleet["rollout-0"] = None
    assert "restarting · 2 restarts" in drawn(live_view(made))


def test_a_step_is_one_line_of_a_log() -> None:
    line = step_line(mesh_status(), STATUS)
    assert line.startswith(
        "step 12/40  reward 0.500  held-out 0.610  1,234 tokens/s  3,072 samples  staleness 0.22"
    )
    assert "\n" not in line


def test_only_another_step_is_news() -> None:
    made = mesh_status()
    assert not made.see(replace(STATUS, tokens_per_s=1.0))
    assert made.see(replace(STATUS, step=13))


def test_reasons_are_shown_only_when_the_trainer_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mesh_status()
    made.see(replace(STATUS, phase=TrainerPhase.WAITING, waiting_for="a batch"))
    assert waiting_lines(made) == []
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + STUCK_S + 1)
    assert waiting_lines(made) == ["a batch"]
    made.waiting = [Waiting(who="take", what="2 of 32 groups", since_s=12.0, owners=("rollout-0",))]
    assert waiting_lines(made) == ["take: 2 of 32 groups, for 12 s (rollout-0)"]
    made.see(STATUS)
    assert waiting_lines(made) == []


def test_a_ledger_that_does_not_balance_says_so() -> None:
    assert ledger_line(LEDGER).endswith("(balanced)")
    assert ledger_line(replace(LEDGER, admitted=4001)).endswith("(NOT BALANCED)")


def test_the_table_at_the_end_shows_the_whole_run() -> None:
    text = drawn(final_table(mesh_status(), {"checkpoints": "runs/demo/checkpoints"}))
    for fact in ("12 of 40", "0.250 → 0.500", "0.120 → 0.610", "mean 0.22, max 1", "rollout-0 1"):
        assert fact in text


def test_the_table_at_the_end_says_what_queue_and_checkpoint_say() -> None:
    made = mesh_status()  # what the trainer said last, before it ended its step
    made.saved_step, made.ledger = 13, replace(LEDGER, trained=3328)
    text = drawn(final_table(made, {}))
    assert made.step == 13 and "13 of 40" in text and "3,328" in text and "3,072" not in text


def test_a_sparkline_rises_with_its_values_and_fits() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    long = sparkline([float(i) for i in range(1000)])
    assert len(long) == 48 and long[0] == "▁" and long[-1] == "█"


def test_mean_staleness_is_over_rows() -> None:
    assert mean_staleness({0: 1, 2: 1}) == 1.0
    assert mean_staleness({}) == 0.0


def test_a_line_is_shown_behind_its_service_and_stored_in_its_file(tmp_path: Path) -> None:
    out = io.StringIO()
    with MergedLog(tmp_path, ["queue", "rollout-0"], Console(file=out, width=200)) as log:
        log("queue", "serving")
        log("rollout-0", "[not markup]")
    assert out.getvalue().splitlines() == ["    queue │ serving", "rollout-0 │ [not markup]"]
    assert (tmp_path / "queue.log").read_text() == "serving\n"
    assert (tmp_path / "rollout-0.log").read_text() == "[not markup]\n"


def test_lines_that_cannot_be_saved_are_shown_reported_once_and_saved_when_there_is_space_again(
    tmp_path: Path,
) -> None:
    out = io.StringIO()
    (tmp_path / "queue.log").mkdir()
    with MergedLog(tmp_path, ["queue"], Console(file=out, width=300)) as log:
        log("queue", "one")
        log("queue", "two")
        reported, *shown = out.getvalue().splitlines()
        assert "logs are shown but not saved" in reported
        assert [line.partition("│ ")[2] for line in shown] == ["one", "two"]
        (tmp_path / "queue.log").rmdir()
        log("queue", "three")
    assert (tmp_path / "queue.log").read_text() == "one\ntwo\nthree\n"


def test_a_long_log_is_moved_aside(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    with MergedLog(tmp_path, ["queue"], console, max_bytes=10, keep=2) as log:
        for number in range(9):
            log("queue", f"{number:04}")
    logs = ("queue.log.2", "queue.log.1", "queue.log")
    assert [(tmp_path / name).read_text().split() for name in logs] == [
        ["0004", "0005"],
        ["0006", "0007"],
        ["0008"],
    ]


def test_the_end_of_a_run_is_read_from_its_own_record(tmp_path: Path) -> None:
    made = mesh_status()
    record = tmp_path / "metrics.jsonl"
    record.write_text(
        '{"step": 0, "val/score/mean": 0.1}\n'
        '{"step": 0, "reward/mean": 0.2}\n'
        '{"step": 1, "reward/mean": null}\n'
        '{"step": 2, "reward/mean": 0.3}\n'
        '{"step": 40, "val/score/mean": 0.97}\n'
    )
    made.recall(record)
    text = drawn(final_table(made, {}))
    assert "0.200 → 0.300" in text and "0.100 → 0.970" in text
    before = dict(made.scores)
    record.write_text('{"step": 0, "val/sco')
    made.recall(record)
    made.recall(tmp_path / "none.jsonl")
    assert made.scores == before


def test_the_commonest_reason_of_dead_letters_stands_in_the_view_and_at_the_end() -> None:
    made = mesh_status()
    dead = {"timeout": 2, "KeyError: 'nope' at reward.py:3\n in compute_score": 40}
    made.ledger = replace(LEDGER, dead_lettered=dead)
    for drawn in (live_view(made), final_table(made, {})):
        text = io.StringIO()
        Console(file=text, width=120).print(drawn)
        assert "40 of 42: KeyError: 'nope' at reward.py:3 in compute_score" in text.getvalue()


def test_a_sign_that_nothing_is_learned_is_shown_with_where_to_read_on() -> None:
    made = mesh_status()
    zeros = {"reward/min": [0.0] * 5, "reward/max": [0.0] * 5}
    made.warnings = warnings_of(lambda name: zeros.get(name, ()))
    text = " ".join(drawn(live_view(made)).split())
    assert "warning no row had a reward in the last 5 steps" in text
    assert "learning-fails.md#no-reward" in text


def test_a_log_that_nobody_reads_any_more_is_still_saved_and_says_so_once(tmp_path: Path) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    lost: list[str] = []
    with MergedLog(tmp_path, ["queue"], text_console(Closed())) as log:
        log.on_lost = lambda: lost.append("stop")
        for line in ("first", "second", "third"):
            log("queue", line)
    assert lost == ["stop"]
    assert (tmp_path / "queue.log").read_text().split() == ["first", "second", "third"]

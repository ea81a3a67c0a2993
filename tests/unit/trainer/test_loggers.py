"""Each logger gets metrics, settings, samples and histograms, continues after a restart, and breaks nothing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest

from meshrl.config import Recipe
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Task, Version
from meshrl.launcher.services.trainer import open_logs
from meshrl.trainer.loggers._types import COLUMNS, LoggedRows, LoggedRun, rows_of
from meshrl.trainer.metrics.log import LearningCheck, MetricsLog, open_loggers
from meshrl.trainer.trajectories.table import schema
from tests.doubles import loggers as recorded_loggers

from . import rank_work

PACKAGES = ("mlflow", "swanlab", "trackio", "wandb")
SETTINGS = {"actor.optim.lr": 0.1, "run.name": "my", "data.train_files": ["a"]}


def table(rows: int = 40) -> Any:
    made = [
        {"uid": f"my/t/{at}.0", "prompt": "p", "response": f"<b>says {at}</b>\nmore", "reward": float(at),
         "advantage": at - 20.0, "staleness": at % 3, "length": at, "mismatch": None}
        for at in range(rows)
    ]  # fmt: skip
    return arrow.Table.from_pylist(made, schema=schema())


def run_in(directory: Path, step: int = 0) -> LoggedRun:
    return LoggedRun(directory=directory, project="p", name="my", settings=SETTINGS, step=step)


def log_two_steps(directory: Path, logger: str, made: int = 0) -> None:
    sinks = open_loggers([logger], run_in(directory, made))
    log = MetricsLog(directory / "metrics.jsonl", sinks)
    for step in (made + 1, made + 2):
        log.write(step, {"reward/mean": 0.5 + step, "actor/loss": math.nan, "time/step_s": 1.0})
        log.rows(step, "train", table())
    log.close()


def test_samples_are_the_best_and_the_worst_and_histograms_have_all_rows() -> None:
    made = rows_of(table(), "train")
    rewards = [row[COLUMNS.index("reward")] for row in made.samples]
    assert rewards == [39, 38, 37, 36, 35, 34, 33, 32, 7, 6, 5, 4, 3, 2, 1, 0]
    assert len(made.histograms["reward"]) == 40 and "mismatch" not in made.histograms
    assert len(rows_of(table(3), "train").samples) == 3


def test_tensorboard_gets_scalars_samples_histograms_settings_and_hides_repeated_steps(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_two_steps(tmp_path, "tensorboard")
    log_two_steps(tmp_path, "tensorboard", made=1)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    tags = events.Tags()
    assert {"reward/mean", "system/trainer_memory_gib"} <= set(tags["scalars"])
    assert set(tags["histograms"]) >= {"histogram/train/reward", "histogram/train/staleness"}
    assert "samples/train/text_summary" in tags["tensors"]
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3]
    text = events.Tensors("samples/train/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    response: <b>says 39</b>\n      more" in text
    assert "_hparams_/experiment" in events.summary_metadata


def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's shell is; what a logger sets itself is gone after the test."""
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_TRACKING_URI", "SWANLAB_MODE", "WANDB_MODE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_logger_calls_its_package_as_that_is_called(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: recorded_loggers.Calls = []
    without_settings(monkeypatch)
    monkeypatch.setitem(sys.modules, package, getattr(recorded_loggers, package)(calls))
    log_two_steps(tmp_path, package)
    log_two_steps(tmp_path, package, made=1)
    assert "does not take" not in caplog.text
    logged = [call["data"] for name, call in calls if name == "log"]
    metrics = [data for data in logged if "reward/mean" in data]
    assert [data["reward/mean"] for data in metrics] == [1.5, 2.5, 2.5, 3.5]
    assert all("system/trainer_cpu_s" in data for data in metrics)
    shown = [data for data in logged if "reward/mean" not in data]
    assert len(shown) == 4
    if package == "mlflow":
        told = shown[0]["rows/train-1.json"]
        assert len(told["samples"]) == 16 and sum(told["histograms"]["reward"]["counts"]) == 40
        params = [call["params"] for name, call in calls if name == "log_params"]
        assert params == [{name: str(value) for name, value in SETTINGS.items()}]
    else:
        assert "samples/train" in shown[0]
        assert any(name.startswith("histogram/train/reward") for name in shown[0])
    first, again = (call for name, call in calls if name == "init")
    if package != "mlflow":
        assert first["config"] == SETTINGS and first["project"] == "p" and first["name"] == "my"
    assert [name for name, _ in calls].count("finish") == 2
    if package == "wandb":
        assert first["id"] == again["id"] != "" and first["mode"] == "offline"
    if package == "trackio":
        assert first["resume"] == "allow"
    if package == "mlflow":
        assert (first["run_id"], again["run_id"]) == (None, "made-by-mlflow")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_real_package_takes_what_it_is_given(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    without_settings(monkeypatch)
    log_two_steps(tmp_path, package)
    log_two_steps(tmp_path, package, made=1)
    assert "does not take" not in caplog.text
    files = [path for path in (tmp_path / package).rglob("*") if path.is_file()]
    for name in ("reward/mean", "system/trainer_cpu_s", "says 39"):
        assert any(name in str(path) or name.encode() in path.read_bytes() for path in files), name


def test_an_unknown_logger_and_one_that_is_not_installed_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no loggers named 'wandbb'; did you mean 'wandb'"):
        open_loggers(["wandbb"], run_in(tmp_path))
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"trainer\.logger: trackio cannot be used"):
        open_loggers(["trackio"], run_in(tmp_path))


OWN_LOGGER = """
def open_logger(run):
    return OwnLogger(run)

class OwnLogger:
    def __init__(self, run):
        self._file = (run.directory / "own.txt").open("w")

    def write(self, step, values):
        self._file.write(f"metrics of {step}\\n")

    def rows(self, step, rows):
        self._file.write(f"{rows.split} rows of {step}\\n")

    def close(self):
        self._file.close()
"""


async def test_a_logger_has_all_figures_before_it_is_closed_also_where_training_fails(
    tmp_path: Path,
    text_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "my_shop").mkdir()
    (tmp_path / "my_shop" / "own_logger.py").write_text(OWN_LOGGER)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = Recipe.model_validate(
        {
            "run": {"name": "r", "dir": str(tmp_path)},
            "model": {"path": str(text_model)},
            "trainer": {"logger": ["my_shop.own_logger"]},
        }
    )
    row = rank_work.trajectories()[0]
    task = Task(run="r", task_id=row.uid.task, prompt_ids=row.tokens[: row.prompt_length])
    with pytest.raises(RuntimeError, match="the step failed"):
        async with open_logs(recipe, 0) as (metrics, trajectories):
            metrics.write(1, {"reward/mean": 0.5})
            trajectories.evaluated(Version(1, 1), {row.uid.task: task}, [row])
            raise RuntimeError("the step failed")
    assert (tmp_path / "own.txt").read_text() == "metrics of 1\neval rows of 1\n"
    assert "does not take" not in caplog.text


class Strict:
    """Refuses to be closed, and whatever comes later."""

    closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        assert not self.closed

    def rows(self, step: int, rows: LoggedRows) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed = True
        raise OSError("no space")


def test_a_logger_that_cannot_be_closed_keeps_no_other_from_it_and_gets_nothing_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = [Strict(), Strict()]
    log = MetricsLog(tmp_path / "metrics.jsonl", both)
    log.close()
    log.rows(1, "train", table())
    assert [one.closed for one in both] == [True, True]
    assert caplog.text.count("the logger Strict cannot be closed") == 2
    assert "does not take" not in caplog.text


def test_metrics_are_written_whatever_a_logger_does(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", [LearningCheck()])
    log.rows(0, "train", table())  # nobody takes rows
    log.write(0, {"reward/mean": 1.0})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward/mean"] == 1.0

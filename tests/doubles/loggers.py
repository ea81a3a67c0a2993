"""Stand-ins for packages of loggers, with the call signatures of the releases that are named; each keeps its calls.

Recorded from the packages: a call that they would refuse is refused here.
"""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]


class Run:
    """The object that `init` returns."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.info = SimpleNamespace(run_id="made-by-mlflow")

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self._calls.append(("define_metric", {"name": name, "step_metric": step_metric}))

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self._calls.append(("log", {"data": data, "step": step}))

    def finish(self) -> None:
        self._calls.append(("finish", {}))


class Shown:
    """A table, a histogram or a text."""

    def __init__(self, *values: Any, columns: Any = None, data: Any = None) -> None:
        self.values, self.columns, self.data = values, columns, data


def wandb(calls: Calls) -> ModuleType:
    """wandb 0.31.0."""
    module: Any = ModuleType("wandb")

    def init(
        entity: str | None = None, project: str | None = None, dir: str | None = None, id: str | None = None,
        name: str | None = None, config: Any = None, mode: str | None = None, resume: str | None = None,
    ) -> Run:  # fmt: skip
        calls.append(("init", dict(locals())))
        return Run(calls)

    module.init, module.Table, module.Histogram = init, Shown, Shown
    return module  # type: ignore[no-any-return]


def trackio(calls: Calls) -> ModuleType:
    """trackio 0.43.0."""
    module: Any = ModuleType("trackio")

    def init(
        project: str, name: str | None = None, group: str | None = None, space_id: str | None = None,
        config: Any = None, resume: str = "never", private: bool | None = None, embed: bool = True,
        auto_log_gpu: bool | None = None, auto_log_cpu: bool | None = None,
    ) -> Run:  # fmt: skip
        calls.append(("init", dict(locals())))
        return Run(calls)

    module.init, module.Table, module.Histogram = init, Shown, Shown
    return module  # type: ignore[no-any-return]


def swanlab(calls: Calls) -> ModuleType:
    """swanlab 0.10.3."""
    module: Any = ModuleType("swanlab")

    def init(
        *, log_dir: str | None = None, mode: str | None = None, workspace: str | None = None,
        project: str | None = None, name: str | None = None, id: str | None = None, resume: Any = None,
        config: Any = None,
    ) -> Run:  # fmt: skip
        calls.append(("init", dict(locals())))
        return Run(calls)

    module.init, module.Text = init, Shown
    return module  # type: ignore[no-any-return]


def mlflow(calls: Calls) -> ModuleType:
    """mlflow-skinny 3.17.2."""
    module: Any = ModuleType("mlflow")

    def set_tracking_uri(uri: str) -> None:
        calls.append(("set_tracking_uri", dict(locals())))

    def set_experiment(experiment_name: str | None = None) -> None:
        (uri,) = {call["uri"] for name, call in calls if name == "set_tracking_uri"}
        if uri.startswith("file:") and os.environ.get("MLFLOW_ALLOW_FILE_STORE") != "true":
            raise RuntimeError("The filesystem tracking backend is in maintenance mode")
        calls.append(("set_experiment", dict(locals())))

    def start_run(
        run_id: str | None = None,
        run_name: str | None = None,
        log_system_metrics: bool | None = None,
    ) -> Run:
        calls.append(("init", dict(locals())))
        return Run(calls)

    def log_params(params: dict[str, Any], run_id: str | None = None) -> None:
        calls.append(("log_params", dict(locals())))

    def log_metrics(
        metrics: dict[str, float], step: int | None = None, run_id: str | None = None
    ) -> None:
        calls.append(("log", {"data": metrics, "step": step}))

    def log_dict(dictionary: dict[str, Any], artifact_file: str, run_id: str | None = None) -> None:
        calls.append(("log", {"data": {artifact_file: dictionary}, "step": None}))

    def end_run(status: str = "FINISHED") -> None:
        calls.append(("finish", {}))

    for function in (
        set_tracking_uri,
        set_experiment,
        start_run,
        log_params,
        log_metrics,
        log_dict,
        end_run,
    ):
        setattr(module, function.__name__, function)
    return module  # type: ignore[no-any-return]

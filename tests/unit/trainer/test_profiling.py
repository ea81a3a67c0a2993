"""What a step did is in a file of its own, and training goes on where it cannot be written."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from meshrl.trainer.metrics.utilisation import profiled

CPU = torch.device("cpu")


def product() -> float:
    return float((torch.ones(8, 8) @ torch.ones(8, 8)).sum())


@pytest.mark.parametrize("kind", ["torch", "memory"])
def test_a_step_is_recorded_and_its_result_kept(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "profile" / "step-2-rank-0"
    assert profiled(product, kind, file, CPU)() == 512.0  # type: ignore[arg-type]
    with gzip.open(f"{file}.trace.json.gz") as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert "aten::mm" in names
    assert ("[memory]" in names) == (kind == "memory")


def test_a_profile_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("a file is in the way")
    assert profiled(product, "torch", tmp_path / "profile" / "step-2-rank-0", CPU)() == 512.0
    assert "this step's profile is not written" in caplog.text


def test_a_step_that_fails_fails_as_it_does_alone(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        profiled(lambda: 1 / 0, "torch", tmp_path / "profile" / "step", CPU)()


@pytest.mark.parametrize("fails", [False, True])
def test_a_range_of_nsys_is_around_the_step_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """By stand-ins for the parts of torch that need a GPU."""
    said: list[str] = []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        said.append(name)
        try:
            yield
        finally:
            said.append(f"end of {name}")

    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", around)
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda: around("operators"))

    def work() -> float:
        said.append("step")
        return 1 / (not fails)

    step = profiled(work, "nsys", tmp_path / "step-2", CPU)
    if fails:
        with pytest.raises(ZeroDivisionError):
            step()
    else:
        assert step() == 1
    assert said == [
        "start",
        "operators",
        "step-2",
        "step",
        "end of step-2",
        "end of operators",
        "stop",
    ]
    assert not list(tmp_path.iterdir())

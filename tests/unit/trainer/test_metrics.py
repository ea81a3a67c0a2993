from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from meshrl.http.view.metrics import MetricsFile
from meshrl.trainer.metrics.learning_signs import SIGNS, WATCHED, warnings_of
from meshrl.trainer.metrics.utilisation import profiled

WELL: Mapping[str, Sequence[float]] = {
    "reward/min": [0.0] * 12,
    "reward/max": [1.0] * 12,
    "reward/mean": [0.1, 0.15, 0.2, 0.18, 0.3, 0.35, 0.4, 0.38, 0.5, 0.55, 0.6, 0.58],
    "advantages/rows_in_equal_groups": [0.2] * 12,
    "actor/grad_norm": [0.3] * 12,
    "actor/entropy": [1.0, 0.9, 0.9, 0.8, 0.8, 0.7, 0.7, 0.6, 0.6, 0.6, 0.5, 0.5],
    "actor/kl_loss": [0.01] * 12,
    "actor/loss": [0.1] * 12,
    "actor/skipped_updates": [0.0] * 12,
    "response/length_mean": [20.0, 22, 25, 24, 30, 31, 33, 36, 40, 41, 42, 44],
    "response/length_max": [60.0, 64, 70, 64, 80, 81, 83, 86, 90, 96, 96, 90],
    "mismatch/logprob_abs_mean": [0.01] * 12,
    "val/score/mean": [0.1, 0.3, 0.5, math.nan],  # the last one scored no row
}


def keys(changes: Mapping[str, Sequence[float]]) -> list[str]:
    curves = {**WELL, **changes}
    return [one.sign.key for one in warnings_of(lambda name: curves.get(name, ()))]


def test_a_run_that_learns_has_no_warning() -> None:
    assert keys({}) == []


@pytest.mark.parametrize(
    ("sign", "changes"),
    [
        ("no-reward", {"reward/min": [0.0] * 12, "reward/max": [1.0] * 6 + [0.0] * 6}),
        ("equal-groups", {"advantages/rows_in_equal_groups": [0.5] * 7 + [1.0] * 5}),
        ("no-gradient", {"actor/grad_norm": [0.1] * 7 + [0.0] * 5}),
        ("collapse", {"reward/mean": [0.1] * 5 + [0.8] * 10 + [0.7, 0.5, 0.3, 0.2, 0.1]}),
        ("entropy-collapse", {"actor/entropy": [1.0] * 6 + [0.05] * 6}),
        ("kl-blow-up", {"actor/kl_loss": [0.1] * 6 + [3.0] * 6}),
        ("reward-hacking", {"val/score/mean": [0.1, 0.5, 0.6, 0.3]}),
        (
            "length-runaway",
            {"response/length_mean": [20.0] * 6 + [90.0] * 6, "response/length_max": [96.0] * 12},
        ),
        ("mismatch", {"mismatch/logprob_abs_mean": [0.2] * 12}),
        ("not-finite", {"actor/skipped_updates": [0.0] * 10 + [1.0, 0.0]}),
        ("not-finite", {"actor/loss": [0.1, math.nan]}),
    ],
)
def test_each_sign_is_told_alone(sign: str, changes: Mapping[str, Sequence[float]]) -> None:
    assert keys(changes) == [sign]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_run_that_began_just_now_has_no_warning(steps: int) -> None:
    start = {name: [0.0] * steps for name in WATCHED}
    assert [one for one in warnings_of(lambda name: start.get(name, ()))] == []


def test_a_paragraph_of_the_documentation_stands_for_each_sign() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/learning-fails.md").read_text()
    for sign in SIGNS:
        assert f"\n## {sign.title}\n" in page
        assert sign.key == sign.title.lower().replace(" ", "-")


def test_the_view_reads_the_same_signs_from_the_file_of_metrics(tmp_path: Path) -> None:
    lines = [{"step": step, "reward/min": 0.0, "reward/max": 0.0} for step in range(6)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = MetricsFile(path)
    metrics.refresh()
    (warning,) = warnings_of(metrics.values)
    assert str(warning) == (
        "no row had a reward in the last 6 steps (docs/how-to/learning-fails.md#no-reward)"
    )


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
    """Stand-ins take the place of the parts of torch that need a GPU."""
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

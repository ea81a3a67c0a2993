"""The page's API over prepared directories: who is admitted, curves that grow, configuration, paging through rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from meshrl.http.view import rows as view_rows
from meshrl.http.view.app import STATIC, Admission, build_app, changes, viewed_runs
from meshrl.http.view.metrics import MOST_POINTS, MetricsFile
from meshrl.rpc.credentials import MeshRole, ensure_credentials, file_of_role

from ...view_runs import (
    HOSTILE,
    SaidServices,
    add_many_rows,
    add_recipe,
    add_rows,
    add_steps,
    two_runs,
)

TOKEN = "the-token-of-the-page"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return two_runs(tmp_path_factory.mktemp("runs"))


def client_of(directories: list[Path], token: str = TOKEN) -> TestClient:
    runs = viewed_runs(directories)
    app = build_app(runs, SaidServices(), Admission(TOKEN, runs))
    return TestClient(app, headers={"authorization": f"Bearer {token}"} if token else {})


@pytest.fixture(scope="module")
def client(directories: list[Path]) -> Iterator[TestClient]:
    with client_of(directories) as client:
        yield client


def ask(client: TestClient, path: str, **parameters: Any) -> Any:
    answer = client.get(f"/api/runs/{path}", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["runs", "events", "runs/gsm8k-grpo/metrics", "runs/x/steps"])
@pytest.mark.parametrize("token", ["", "another"])
def test_nothing_of_a_run_is_told_without_a_token(
    directories: list[Path], path: str, token: str
) -> None:
    with client_of(directories, token) as client:
        answer = client.get(f"/api/{path}")
        assert answer.status_code == 401
        assert "open the address that `meshrl view` printed" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("role", "status"),
    [(MeshRole.READER, 200), (MeshRole.OPERATOR, 200), (MeshRole.ROLLOUT, 403)],
)
def test_a_readers_credential_of_every_run_is_admitted(
    tmp_path: Path, role: MeshRole, status: int
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for directory in (first, second):
        directory.mkdir(mode=0o700)
        ensure_credentials(directory)
    credential = file_of_role(first, role).read_text().strip()
    with client_of([first], credential) as client:
        assert client.get("/api/runs").status_code == status
    with client_of([first, second], credential) as client:
        assert client.get("/api/runs").status_code == (401 if status == 200 else 403)


def test_the_page_may_load_nothing_from_elsewhere_and_parse_no_markup(client: TestClient) -> None:
    for path in ("/", "/app.js", "/style.css", "/uPlot.iife.min.js", "/api/runs", "/missing"):
        policy = client.get(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ")
        assert "require-trusted-types-for 'script'" in policy
    own = [path for path in STATIC.iterdir() if path.suffix in (".js", ".html", ".css")]
    for path in own:
        text = path.read_text()
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text, path.name
        if not path.name.startswith("uPlot"):
            assert "http://" not in text and "https://" not in text, path.name


def test_the_license_of_what_is_vendored_lies_beside_it() -> None:
    assert "Leon Sorokin" in (STATIC / "uPlot.LICENSE").read_text()
    assert "MIT License" in (STATIC / "uPlot.LICENSE").read_text()


def test_a_curve_is_sent_once_and_then_what_was_appended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    add_steps(run, 0, 5)
    with client_of([run]) as client:
        first = ask(client, "run/metrics", name=["reward/mean", "no/such"])
        assert first["curves"]["reward/mean"]["steps"] == [0, 1, 2, 3, 4]
        assert "val/score/mean" in first["names"] and "no/such" not in first["curves"]
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "reward/mean": 0.5}\n{"step": 6, "reward')
        state = {"generation": first["generation"], "after": first["lines"]}
        second = ask(client, "run/metrics", name=["reward/mean"], **state)
        assert second["curves"]["reward/mean"] == {"steps": [5], "values": [0.5]}
        assert second["problem"] == ""


def test_a_rewritten_history_is_sent_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in range(9)]
    path.write_text("".join(lines))
    metrics = MetricsFile(path)
    metrics.refresh()
    # A trainer that resumes drops the steps that it repeats, and may have written as many bytes since.
    path.write_text("".join(lines[:4]) + "".join(lines[4:]).replace("0.5", "0.7"))
    metrics.refresh()
    assert metrics.generation == 1 and metrics.lines == 9
    assert metrics.curves(["reward/mean"])["reward/mean"].values == [0.5] * 4 + [0.7] * 5


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1, 2]",
        '{"reward/mean": 1.0}',
        '{"step": "three"}',
        '{"step": 1e400}',
        '{"step": null}',
        f'{{"step": {2**70}}}',
        "\x00\x01",
        "[" * 100_000,
    ],
)
def test_a_broken_line_is_left_out_and_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "reward/mean": 1}}\n{line}\n{{"step": 2, "reward/mean": 3}}\n')
    metrics = MetricsFile(path)
    metrics.refresh()
    assert metrics.curves(["reward/mean"])["reward/mean"].values == [1.0, 3.0]
    assert "line 2 is no JSON object with a step" in metrics.problem


def test_values_that_are_no_numbers_are_no_points(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        f'{{"step": 1, "a": null, "b": NaN, "c": "x", "d": true, "e": {10**400}, "f": 2}}\n'
    )
    metrics = MetricsFile(path)
    metrics.refresh()
    assert metrics.names == ["f"]


def test_long_curves_are_thinned_to_the_means_of_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    count = 3 * MOST_POINTS
    path.write_text("".join(f'{{"step": {step}, "a": {step}}}\n' for step in range(count)))
    metrics = MetricsFile(path)
    metrics.refresh()
    curve = metrics.curves(["a"])["a"]
    assert len(curve.steps) == MOST_POINTS and curve.steps[:2] == [1, 4] == curve.values[:2]


@pytest.mark.parametrize("view", ["metrics", "fleet", "flow", "config", "steps"])
def test_a_run_without_files_is_one_line(tmp_path: Path, view: str) -> None:
    with client_of([tmp_path]) as client:
        answer = ask(client, f"{tmp_path.name}/{view}")
        assert "\n" not in answer["problem"]
        if view in ("metrics", "config", "fleet"):
            assert answer["problem"]


@pytest.mark.parametrize(
    "text", ["a: [", "- 1\n", "\x00", "a: &a [*a]", "!!python/object:os.system {}"]
)
def test_a_broken_recipe_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with client_of([tmp_path]) as client:
        answer = ask(client, f"{tmp_path.name}/config")
        assert answer["entries"] == [] or text == "a: &a [*a]"
        assert "recipe.yaml is not a recipe" in answer["problem"]


def test_metrics_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with client_of([tmp_path]) as client:
        answer = ask(client, f"{tmp_path.name}/metrics")
        assert answer["problem"] == "metrics.jsonl: Is a directory"


def test_the_configuration_shows_what_differs(client: TestClient) -> None:
    found = ask(client, "gsm8k-grpo/config", other="gsm8k-fast")["entries"]
    entries = {entry["key"]: entry for entry in found}
    n = entries["queue.max_staleness"]
    assert (n["value"], n["default"], n["changed"], n["differs"]) == ("2", "1", True, False)
    rate = entries["actor.optim.lr"]
    assert (rate["value"], rate["other"], rate["changed"], rate["differs"]) == (
        "1e-06",
        "3e-06",
        False,
        True,
    )
    assert "Optimizer steps" in n["doc"]
    # The default of a key is that of its section, not of its class.
    assert not entries["critic.optim.lr"]["changed"]


def test_passwords_in_urls_are_not_shown(tmp_path: Path) -> None:
    add_recipe(tmp_path, "queue.store=redis", "queue.redis_url='redis://me:secret@host:1/0'")
    with client_of([tmp_path]) as client:
        shown = client.get(f"/api/runs/{tmp_path.name}/config").text
    assert "secret" not in shown and "redis://***@host:1/0" in shown


def test_rows_are_filtered_sorted_and_searched(client: TestClient) -> None:
    path = "gsm8k-grpo/rows/train/60"
    everything = ask(client, path, limit=200)
    assert everything["rows"] == everything["matching"] == 24
    sorted_up = ask(client, path, sort="mismatch", limit=200)["page"]
    gaps = [row["mismatch"] for row in sorted_up]
    assert gaps == sorted(gaps)
    sorted_down = ask(client, path, sort="mismatch", descending=True, limit=5, offset=2)["page"]
    assert [row["mismatch"] for row in sorted_down] == gaps[::-1][2:7]
    wrong = ask(client, path, where="reward < 0.5 and outcome == 'ok'", limit=200)["page"]
    assert wrong and all(row["reward"] == 0 and row["outcome"] == "ok" for row in wrong)
    calls = ask(client, path, where="components.calls == 1 and mismatch > 0", limit=200)["page"]
    assert {row["turns"] for row in calls} == {2} and len(calls) == 4
    found = ask(client, path, search="AARHUS", limit=200)
    assert found["matching"] == 4 and all("Aarhus" in row["response"] for row in found["page"])
    assert (
        ask(client, path, where="worker == 'rollout-1'", search="nowhere to be found")["page"] == []
    )


def test_a_group_comes_with_all_its_rows(client: TestClient) -> None:
    path = "gsm8k-grpo/rows/train/60"
    answer = ask(client, path, grouped=True, where="reward > 0.5", sort="advantage", limit=2)
    assert len(answer["page"]) == 2 and answer["matching"] <= 6
    for group in answer["page"]:
        assert len(group) == 4 and len({row["task"] for row in group}) == 1
        assert [row["index"] for row in group] == [0, 1, 2, 3]
        assert all(row["asked"] == (row["reward"] > 0.5) for row in group)
        assert any(row["asked"] for row in group)


def test_a_row_comes_with_its_tokens_and_hostile_text_stays_text(client: TestClient) -> None:
    row = ask(client, "gsm8k-grpo/rows/train/60/0")["row"]
    assert row["response"].startswith(HOSTILE) and row["token_texts"][0] == HOSTILE
    assert len(row["token_texts"]) == len(row["rollout_logprobs"]) == row["length"]
    assert row["reward_components"][0][0] == "correct"
    tools = ask(client, "gsm8k-grpo/rows/train/60/20")["row"]
    assert [part["sampled"] for part in tools["parts"]] == [True, False, True]
    assert tools["rollout_logprobs"][tools["parts"][1]["start"]] is None
    raw = client.get("/api/runs/gsm8k-grpo/rows/train/60/0")
    assert raw.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"sort": "nothing"}, "no column 'nothing'; there are: uid, task"),
        ({"where": "reward"}, "'reward' is a number, no condition"),
        ({"where": "reward = 1"}, "equal is =="),
        ({"where": "__import__('os') == 1"}, "is not known here"),
    ],
)
def test_a_question_that_makes_no_sense_is_one_line(
    client: TestClient, question: dict[str, str], said: str
) -> None:
    answer = ask(client, "gsm8k-grpo/rows/train/60", **question)
    assert said in answer["problem"] and answer["page"] == []


def test_rows_that_are_not_there_are_one_line(client: TestClient) -> None:
    assert "step-7.parquet: no such file" in ask(client, "gsm8k-grpo/rows/train/7")["problem"]
    assert "has rows 0 to 23" in ask(client, "gsm8k-grpo/rows/train/60/24")["problem"]
    assert client.get("/api/runs/gsm8k-grpo/rows/other/60").status_code == 422
    assert client.get("/api/runs/nobody/rows/train/60").status_code == 404


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "middle", "columns"])
def test_a_broken_trajectory_file_is_one_line(tmp_path: Path, damage: str) -> None:
    add_rows(tmp_path, 3, groups=2, size=2)
    path = tmp_path / "trajectories" / "step-3.parquet"
    data = bytearray(path.read_bytes())
    if damage == "empty":
        data = bytearray()
    elif damage == "text":
        data = bytearray(b"no parquet at all, but long enough to be read as one")
    elif damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "middle":
        data[4:2000] = bytes(1996)
    else:
        pq.write_table(pa.table({"task": [1], "reward": [["x"]]}), path)
        data = bytearray(path.read_bytes())
    path.write_bytes(data)
    name = tmp_path.name
    with client_of([tmp_path]) as client:
        for where in ("rows/train/3", "rows/train/3/0"):
            for question in (
                {},
                {"grouped": True},
                {"search": "a"},
                {"sort": "reward"},
                {"where": "reward>0"},
                {"where": "'a' in task"},
                {"where": "1 < 2"},
            ):
                answer = ask(client, f"{name}/{where}", **question)
                assert "\n" not in answer["problem"]
                assert answer["problem"] or damage == "columns"


def test_pages_of_many_rows_read_no_more_than_they_show(tmp_path: Path) -> None:
    count = 100_000
    add_many_rows(tmp_path, 1, count)
    with client_of([tmp_path]) as client:
        where = f"{tmp_path.name}/rows/train/1"
        page = ask(client, where, sort="reward", descending=True, offset=count // 8, limit=50)
        assert page["matching"] == count and len(page["page"]) == 50
        assert {row["reward"] for row in page["page"]} == {6.0}
        assert ask(client, where, search="answer 99999")["page"][0]["number"] == 99_999
        groups = ask(client, where, grouped=True, where="reward == 3", offset=10_000, limit=10)
        assert len(groups["page"]) == 10 and all(len(group) == 8 for group in groups["page"])
        assert ask(client, f"{where}/77777")["row"]["response"] == "answer 77777"


def test_what_is_being_written_is_no_step(tmp_path: Path) -> None:
    add_rows(tmp_path, 3, groups=1, size=1)
    (tmp_path / "trajectories" / ".step-4.parquet.writing").write_bytes(b"PAR1")
    (tmp_path / "trajectories" / "eval-3.parquet").write_bytes(b"")
    found = [(file["split"], file["step"]) for file in view_rows.steps_of(tmp_path)]
    assert sorted(found) == [("eval", 3), ("train", 3)]


def test_two_runs_of_one_name_have_keys_of_their_own(tmp_path: Path) -> None:
    runs = viewed_runs([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "a" / "run"])
    assert [run.key for run in runs] == ["run", "run-2"]
    assert viewed_runs([tmp_path / "a" / ".."])[0].key == tmp_path.name


async def test_a_watcher_hears_of_what_changes_and_only_of_that() -> None:
    states = [{"key": "a", "lines": 1}, {"key": "b", "lines": 1}]
    closing = asyncio.Event()
    events = changes(lambda: list(states), closing, every_s=0.0)
    assert json.loads((await anext(events))[6:]) == states
    states[1] = {"key": "b", "lines": 2}
    assert json.loads((await anext(events))[6:]) == [{"key": "b", "lines": 2}]
    closing.set()
    with pytest.raises(StopAsyncIteration):
        await anext(events)


def test_a_step_is_shown_over_time_and_broken_spans_are_left_out(directories: list[Path]) -> None:
    with client_of(directories) as client:
        newest = ask(client, "gsm8k-grpo/timeline")
        assert (newest["step"], newest["first"], newest["last"]) == (60, 59, 60)
        assert newest["seconds"] == pytest.approx(4.0) and newest["problem"] == ""
        lanes = {lane["service"]: lane["spans"] for lane in newest["lanes"]}
        assert list(lanes) == ["reward", "rollout-0", "rollout-1", "trainer"]
        waiting = next(span for span in lanes["trainer"] if span["name"] == "waiting")
        assert (waiting["start_s"], waiting["end_s"]) == (0.0, pytest.approx(1.1))
        assert ask(client, "gsm8k-grpo/timeline", step=59)["step"] == 59
        away = ask(client, "gsm8k-grpo/timeline", step=7)
        assert away["lanes"] == [] and away["problem"] == "step 7 has no spans"
        none = ask(client, "gsm8k-fast/timeline")
        assert none["lanes"] == [] and "run.trace" in none["problem"]
        file = directories[0] / "spans" / "rollout-0.jsonl"
        whole = file.read_text()
        file.write_text(whole + '{"name": "step", "att\n[1]\n{"name": "x"}\n')
        torn = ask(client, "gsm8k-grpo/timeline")
        file.write_text(whole)
        assert torn["lanes"] == newest["lanes"]
        assert torn["problem"] == "rollout-0.jsonl: 3 lines cannot be read: left out"


def test_dead_letters_are_replayed_by_an_operator_of_that_run_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for directory in (first, second):
        directory.mkdir(mode=0o700)
        ensure_credentials(directory)
    letters = {"stage": "rollout", "outcome": "timeout", "reason": "late"}
    runs, services = viewed_runs([first]), SaidServices(up=("a",))
    app = build_app(runs, services, Admission(TOKEN, runs))

    def ask_as(credential: str) -> tuple[bool, int]:
        headers = {"authorization": f"Bearer {credential}"}
        with TestClient(app, headers=headers) as client:
            rights = client.get("/api/runs/a/rights")
            answer = client.post("/api/runs/a/replay", json=letters)
            if answer.status_code == 200:
                assert answer.json() == {"rows": 44, "problem": ""}
            return rights.status_code == 200 and rights.json()["replay"], answer.status_code

    def of(directory: Path, role: MeshRole) -> str:
        return file_of_role(directory, role).read_text().strip()

    assert ask_as(of(first, MeshRole.READER)) == (False, 403)
    assert ask_as(TOKEN) == (False, 401)
    assert ask_as(of(second, MeshRole.OPERATOR)) == (False, 401)
    assert ask_as(of(first, MeshRole.TRAINER)) == (False, 403)
    assert services.replayed == []
    assert ask_as(of(first, MeshRole.OPERATOR)) == (True, 200)
    assert services.replayed == [("a", "rollout", "timeout", "late")]

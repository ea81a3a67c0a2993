"""`meshrl fleet` where there is no mesh, and how it joins what the trainer, the members and `up` know."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from meshrl.cli.commands.fleet import COLUMNS, fleet, membership_json
from meshrl.cli.find_mesh import Membership, from_coordinator, with_supervisor_state
from meshrl.cli.root import main
from meshrl.contract.types import Version
from meshrl.weights.fleet import FleetView, ReplicaState, ReplicaView

NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--trainer", NOBODY], 1, f"the trainer at {NOBODY} does not answer"),
        (["--trainer", NOBODY, "drain", "x"], 1, f"the trainer at {NOBODY} does not answer"),
        (["--trainer", NOBODY, "add"], 2, "give --queue HOST:PORT"),
        (
            ["--trainer", NOBODY, "--run-dir", "x"],
            2,
            "RUN and --trainer are two ways to find a mesh: give one",
        ),
        (
            ["--run-dir", "nowhere"],
            2,
            "no run 'nowhere': want a run's directory, or its name in runs/",
        ),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(
    words: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["fleet", *words])
    assert ended.value.code == code
    line = capsys.readouterr().err
    assert line.startswith("error: ") and said in line and line.count("\n") == 1


def replica(name: str, state: ReplicaState, reason: str = "") -> ReplicaView:
    return ReplicaView(
        name=name,
        state=state,
        generation=1,
        version=Version(1, 3),
        last_sync_s=0.5,
        pause_s=0.01,
        reason=reason,
    )


def test_the_supervisor_knows_why_a_worker_went() -> None:
    out = from_coordinator(replica("rollout-0", ReplicaState.OUT, "it died or went away"))
    assert (out.state, out.reason, out.supervised) == ("OUT", "it died or went away", False)
    drained = with_supervisor_state(out, {"phase": "drained", "pid": 7, "restarts": 2})
    assert (drained.state, drained.reason, drained.restarts) == ("OUT", "drained", 2)
    # The coordinator may not have noticed yet.
    serving = from_coordinator(replica("rollout-1", ReplicaState.SERVING))
    assert with_supervisor_state(serving, {"phase": "failed", "restarts": 0}).gone
    assert not with_supervisor_state(serving, {"phase": "ready", "restarts": 0}).gone


def test_json_tells_of_members_that_do_not_answer() -> None:
    member = from_coordinator(replica("rollout-0", ReplicaState.SUSPECT))
    view = FleetView(run="r", epoch=1, committed=Version(1, 3), proposed=None, replicas=())
    report = membership_json(Membership(view=view, members={"rollout-0": member}))
    assert (report["run"], report["committed"], report["proposed"]) == ("r", "1.3", None)
    (one,) = report["members"]
    assert (one["state"], one["version"], one["answers"]) == ("SUSPECT", "1.3", False)
    assert "breaker" not in one


NAMES = ("rollout-0", "rollout-worker-of-the-second-rack-17")


@pytest.fixture
def membership() -> Membership:
    views = [replica(name, ReplicaState.OUT, "it died or went away a minute ago") for name in NAMES]
    return Membership(
        view=FleetView(
            run="r", epoch=1, committed=Version(1, 3), proposed=None, replicas=tuple(views)
        ),
        members={view.name: from_coordinator(view) for view in views},
    )


@pytest.mark.parametrize(
    ("columns", "width", "has"),
    [("80", 80, ("member", "state", "version")), ("160", 160, COLUMNS), (None, 160, COLUMNS)],
)
def test_names_of_workers_are_whole_in_a_pipe(
    membership: Membership,
    columns: str | None,
    width: int,
    has: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`COLUMNS` counts also where the output is no terminal; without it there is room for every column."""
    monkeypatch.setattr("meshrl.cli.commands.fleet._mesh_address", lambda *_: None)

    async def read(_: object) -> Membership:
        return membership

    monkeypatch.setattr("meshrl.cli.commands.fleet.read_membership", read)
    printed = CliRunner(env={"COLUMNS": columns}).invoke(fleet, [], catch_exceptions=False).output
    lines = printed.splitlines()
    assert max(map(len, lines)) <= width
    assert all(any(name in line for line in lines) for name in (*NAMES, *has)), lines
    assert "…" not in printed and "1.3" in printed

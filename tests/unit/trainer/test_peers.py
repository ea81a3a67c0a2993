"""The machines of one trainer, without a machine: a store of torch's on loopback, and processes that are silent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshrl.common.sockets import interface_towards, loopback_interface
from meshrl.config import Recipe, load_recipe
from meshrl.contract.errors import InfraError, UserError
from meshrl.launcher.running import ranks
from meshrl.rpc.runtime import ServerSettings
from meshrl.trainer.ranks.peers import Seat, until_listening

from .ranks import Ranks

WORLD = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "seat"),
    [
        ({}, Seat(0, 0, 1, True)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Seat(1, 0, 1, False)),
        (WORLD, Seat(5, 1, 2, False)),
        (WORLD | {"RANK": "4"}, Seat(4, 1, 2, True)),
    ],
)
def test_a_rank_knows_its_machine_by_torchruns_variables(
    environment: dict[str, str], seat: Seat
) -> None:
    assert Seat.of(environment) == seat


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_towards("127.0.0.1") == loopback_interface()
    assert interface_towards("no.such.host.invalid") is None


def test_a_first_machine_that_does_not_come_is_one_line() -> None:
    with pytest.raises(
        InfraError, match=r"first machine does not listen on 127.0.0.1:1: .*refused"
    ):
        until_listening("127.0.0.1", 1, time.monotonic())


def test_others_end_when_one_is_silent_is_replaced_or_the_first_one_ends(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run("peers_work:main", output=tmp_path / "output")
    told = (tmp_path / "output").read_text()
    assert "error: rank 0: machine 1 has said nothing for 1 s" in told
    assert "error: rank 0: machine 1 has been started again" in told
    assert "rank 1: rank 0 has ended before its time" in told
    assert told.count("together to the end") == 2


def written(folder: Path, *overrides: str) -> Recipe:
    path = folder / "my.yaml"
    path.write_text("model: {path: small}\n")
    return load_recipe(path, ("trainer.nnodes=2", "trainer.nproc=4", *overrides), check=False)


def test_gradients_leave_a_machine_only_where_somebody_said_so(tmp_path: Path) -> None:
    recipe = written(tmp_path)
    assert recipe.trainer.ranks == 8
    with pytest.raises(UserError, match=r"trainer\.nnodes: 2 machines exchange gradients"):
        ranks.refuse_open_ranks(recipe, ServerSettings())
    ranks.refuse_open_ranks(recipe, ServerSettings(allow_insecure_bind=True))
    ranks.refuse_open_ranks(written(tmp_path, "trainer.nnodes=1"), ServerSettings())


def test_machines_meet_at_the_address_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(UserError, match=r"meet at weights\.host, and that is 127\.0\.0\.1"):
        ranks._meeting_place(written(tmp_path))
    assert ranks._meeting_place(written(tmp_path, "weights.host=b")) == ("b", 29500)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "x")
    with pytest.raises(UserError, match="MASTER_PORT: 'x'"):
        ranks._meeting_place(written(tmp_path))

"""The machines of one trainer, without a machine: a store of torch's on loopback, and processes that are silent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshrl.common.sockets import interface_towards, loopback_interface
from meshrl.config import Recipe, load_recipe
from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import ConfigError, InfraError, UserError
from meshrl.launcher import ranks
from meshrl.launcher.ranks import refuse_open_weights
from meshrl.rpc.runtime import ServerSettings
from meshrl.trainer.ranks.peers import Seat, until_listening
from meshrl.weights.carrier import RunPaths
from meshrl.weights.carriers import gloo

from ...listening import sockets
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
    ranks.run("peers", output=tmp_path / "output")
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


@pytest.mark.parametrize("count", [1, 2])
def test_the_ranks_of_one_machine_listen_on_loopback_only(
    ranks: Ranks, tmp_path: Path, count: int
) -> None:
    ranks.run("listen", output=tmp_path / "output", ranks=count)
    lines = (tmp_path / "output").read_text().splitlines()
    assert len(lines) == count
    assert set(" ".join(lines).split()) == {"127.0.0.1"}


async def test_the_store_of_the_gloo_carrier_listens_where_the_recipe_says(tmp_path: Path) -> None:
    before = sockets()
    carrier = gloo.Carrier(WeightsConfig(carrier="gloo"), RunPaths(directory=tmp_path))
    endpoint = await carrier.listen()
    assert {f"{host}:{port}" for host, port in sockets() - before} == {endpoint}
    other = gloo.Carrier(
        WeightsConfig(carrier="gloo", port=int(endpoint.rpartition(":")[2])),
        RunPaths(directory=tmp_path),
    )
    with pytest.raises(ConfigError, match=f"cannot listen on {endpoint}"):
        await other.listen()
    await carrier.close()


async def test_gloo_says_loudly_that_others_can_take_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for host, lines in (("127.0.0.1", 0), ("0.0.0.0", 1)):
        config = WeightsConfig(carrier="gloo", host=host)
        carrier = gloo.Carrier(config, RunPaths(directory=tmp_path))
        await carrier.listen()
        await carrier.close()
        said = [line for line in caplog.messages if line.startswith("INSECURE: weights.host")]
        assert len(said) == lines, host


@pytest.mark.parametrize(
    ("weights", "permitted", "refused"),
    [
        ({"host": "0.0.0.0"}, False, True),
        ({"host": "trainer.lan", "carrier": "auto"}, False, True),
        ({"host": "0.0.0.0"}, True, False),
        ({"host": "0.0.0.0", "carrier": "delta"}, False, False),
        ({"host": "0.0.0.0", "carrier": "auto", "directory": "s3://b/w"}, False, False),
        ({"host": "127.0.0.1"}, False, False),
    ],
)
def test_weights_are_open_to_others_only_by_an_explicit_choice(
    weights: dict[str, object], permitted: bool, refused: bool
) -> None:
    config = WeightsConfig.model_validate(weights)
    settings = ServerSettings(allow_insecure_bind=permitted)
    if refused:
        with pytest.raises(UserError, match="neither encrypts nor asks who receives: set weights"):
            refuse_open_weights(config, settings)
    else:
        refuse_open_weights(config, settings)

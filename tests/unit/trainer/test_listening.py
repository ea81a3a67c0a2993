"""Nothing of a trainer or of the gloo carrier listens beyond the address that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import ConfigError, UserError
from meshrl.launcher.running.ranks import refuse_open_weights
from meshrl.rpc.runtime import ServerSettings
from meshrl.weights.carrier import RunPaths
from meshrl.weights.carriers import gloo

from ...listening import sockets
from .ranks import Ranks


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

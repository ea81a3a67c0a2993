"""What all tests of the queue share."""

from __future__ import annotations

import pytest

from meshrl.transferqueue.sharding import ShardedQueue


@pytest.fixture(autouse=True)
def no_shard_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for half a second is no shard that lags: a test of those says after how long."""
    defaults = ShardedQueue.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "lag_s", 60.0)

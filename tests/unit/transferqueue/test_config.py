"""The recipe's `queue:` section."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from meshrl.common.config import documentation
from meshrl.transferqueue.config import QueueConfig


@pytest.mark.parametrize("value", ["inf", math.inf])
def test_infinite_staleness_has_one_spelling(value: object) -> None:
    config = QueueConfig.model_validate({"max_staleness": value})
    assert config.max_staleness == "inf"
    assert config.run_spec("r", group_size=2, batch_groups=3).max_staleness == math.inf


@pytest.mark.parametrize("value", [-1, 1.5, "many", -math.inf])
def test_a_staleness_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        QueueConfig.model_validate({"max_staleness": value})


def test_every_field_is_documented() -> None:
    undocumented = [n for n in QueueConfig.model_fields if not documentation(QueueConfig, n)]
    assert undocumented == []

"""Guessed tokens: log-probs, frequencies and updates are as without. `make nightly` has the whole suite with them."""

from __future__ import annotations

import pytest

from .test_real_servers import (  # noqa: F401 - fixtures, and tests that are collected here too
    SPECULATIVE,
    Kind,
    checkpoint,
    engine,
    owner,
    param,
    staging,
    test_a_swap_in_mid_generation_labels_every_token_and_serves_the_new_weights,
    test_logprobs_are_those_of_the_distribution_that_was_sampled,
    test_tokens_are_drawn_as_often_as_their_logprobs_claim,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module", params=[param(SPECULATIVE, nightly=False)])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found

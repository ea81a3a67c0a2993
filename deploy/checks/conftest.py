"""Processes that a check starts are forks of one that has imported the product, as in the tests."""

from __future__ import annotations

from tests import forks

forks.install()

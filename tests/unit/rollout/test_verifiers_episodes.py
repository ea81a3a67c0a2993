"""Which trace of an episode of verifiers is trained, decided without the package."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from meshrl.rollout.programs import verifiers


class Some(type):
    """The type of a class that has any attribute and any type argument."""

    def __getattr__(cls, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)

    def __getitem__(cls, item: object) -> Some:
        return cls


class Anything(ModuleType):
    """A module of which any name is a class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return Some(name, (), {})


@pytest.fixture(scope="module")
def outcome_of() -> Callable[..., dict[str, Any]]:
    imported = {
        node.module
        for node in ast.walk(ast.parse(verifiers.SERVER.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    names = {"verifiers.v1", *(name for name in imported if name.startswith("verifiers."))}
    parents = {name.rsplit(".", n)[0] for name in names for n in range(name.count(".") + 1)}
    with pytest.MonkeyPatch.context() as patch:
        for name in sorted(parents):  # a package before its modules
            patch.setitem(sys.modules, name, module := Anything(name))
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        found: Callable[..., dict[str, Any]] = runpy.run_path(str(verifiers.SERVER))["outcome_of"]
        return found


def error(message: str) -> Any:
    return SimpleNamespace(type="TaskError", message=message)


def trace(name: str, seat: str = "agent", reward: float = 0.0, **changes: Any) -> Any:
    parts = {"exact": reward, "said": None}
    values: dict[str, Any] = {
        "id": name,
        "agent": SimpleNamespace(name=seat, trainable=changes.pop("trainable", True)),
        "rewards": {k: v if v is None else SimpleNamespace(value=v) for k, v in parts.items()},
        "reward": reward,
        "ok": True,
        "last_error": None,
    }
    return SimpleNamespace(**{**values, **changes})


def episode(*traces: Any, last_error: Any = None) -> Any:
    return SimpleNamespace(traces=list(traces), last_error=last_error)


def test_of_several_tries_the_first_that_began_is_the_row_with_its_own_reward(
    outcome_of: Callable[..., dict[str, Any]],
) -> None:
    tries = [trace("a", reward=0.25), trace("b", reward=1.0), trace("c", reward=0.5)]
    # They end in another order, and one was tried again under another id.
    ended = episode(tries[1], tries[2], tries[0])
    found = outcome_of(ended, [trace("z"), *tries], "", complete=True)
    assert found.pop("note").startswith("an episode has 3 traces of agent: a row is the first one")
    assert found == {"conversation": "a", "reward": {"exact": 0.25, "score": 0.25}}


def test_a_seat_that_is_not_trainable_is_never_the_row(
    outcome_of: Callable[..., dict[str, Any]],
) -> None:
    both = [trace("u", "user", trainable=False), trace("a", "assistant", reward=1.0)]
    found = outcome_of(episode(*both), both, "", complete=True)
    assert found == {"conversation": "a", "reward": {"exact": 1.0, "score": 1.0}}
    for seat, said in (("user", " as user"), ("", "")):
        alone = outcome_of(episode(both[0]), both[:1], seat, complete=True)
        assert alone == {"error": f"no agent took part that may be trained{said}"}


def test_of_two_seats_that_may_be_trained_one_has_to_be_named(
    outcome_of: Callable[..., dict[str, Any]],
) -> None:
    both = [trace("p", "proposer", 0.5), trace("s", "solver", 1.0)]
    found = outcome_of(episode(*both), both, "", complete=True)
    assert found == {
        "error": "proposer and solver may be trained: want one in rollout.program_options.seat"
    }
    named = outcome_of(episode(*both), both, "solver", complete=True)
    assert named == {"conversation": "s", "reward": {"exact": 1.0, "score": 1.0}}


def test_an_episode_that_is_not_complete_has_its_cause_and_its_conversation(
    outcome_of: Callable[..., dict[str, Any]],
) -> None:
    broken = trace("a", ok=False, last_error=error("the oven is cold"))
    of_all = error("the solver failed, so the judge never ran")
    found = outcome_of(episode(broken, last_error=of_all), [broken], "", complete=False)
    assert found == {"conversation": "a", "error": "TaskError: the oven is cold"}
    found = outcome_of(episode(trace("a"), last_error=of_all), [trace("a")], "", complete=False)
    assert found["error"] == "TaskError: the solver failed, so the judge never ran"
    found = outcome_of(episode(), [], "", complete=False)
    assert found == {"error": "the environment takes it for no result"}


def test_errors_of_a_try_that_was_repeated_are_no_failure(
    outcome_of: Callable[..., dict[str, Any]],
) -> None:
    again = trace("b", reward=1.0, last_error=error("a hiccup"))
    found = outcome_of(episode(again), [trace("a"), again], "", complete=True)
    assert found == {"conversation": "b", "reward": {"exact": 1.0, "score": 1.0}}


def test_an_environment_that_goes_on_without_the_trained_seat_gives_no_row(
    outcome_of: Callable[..., dict[str, Any]],
) -> None:
    lost = trace("a", ok=False, last_error=error("gone"))
    found = outcome_of(
        episode(lost, trace("b", "critic", trainable=False)), [lost], "", complete=True
    )
    assert found == {"conversation": "a", "error": "TaskError: gone"}

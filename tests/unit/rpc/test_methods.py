"""The tables: a row for each method of the .proto, and everything that follows from one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from meshrl.contract.errors import UserError
from meshrl.contract.ports import Queue
from meshrl.contract.types import Outcome, Uid, Version
from meshrl.rpc.clients.base import row
from meshrl.rpc.clients.queue import QueueClient, QueueTable
from meshrl.rpc.identity import TABLES
from meshrl.rpc.methods import Method, MethodTable, bare_row, service
from meshrl.rpc.servicers import (
    QueueAdminServicer,
    QueueServicer,
    RewardRegistryServicer,
    RewardServicer,
    RolloutServicer,
    TrainerServicer,
    TrainingServicer,
)
from meshrl.v1 import rollout_pb2
from meshrl.weights.carriers.delta import PatchServicer
from meshrl.weights.servicer import WeightsServicer

SERVICERS = (
    QueueServicer,
    QueueAdminServicer,
    RolloutServicer,
    RewardServicer,
    RewardRegistryServicer,
    TrainerServicer,
    TrainingServicer,
    WeightsServicer,
    PatchServicer,
)
QUEUE = QueueTable.methods


def by_row() -> list[Method]:
    """The methods that no client and no servicer has by hand."""
    return [
        method
        for servicer in SERVICERS
        for name, method in servicer.table.methods.items()
        if method.arity == "unary_unary" and not hasattr(servicer, name)
    ]


def test_every_method_of_a_servicer_has_a_port_or_is_there_by_hand() -> None:
    for servicer in SERVICERS:
        for name, method in servicer.table.methods.items():
            assert method.row.port is not None or hasattr(servicer, name), method.path
            assert method.arity == "unary_unary" or hasattr(servicer, name), method.path
            assert method.row.roles, method.path


def test_the_conversions_of_every_row_can_be_made() -> None:
    assert len(by_row()) > 15
    for method in by_row():
        for made in (method.encode_arguments, method.decode_arguments, method.encode_answer):
            assert callable(made), method.path
    for table in TABLES:
        for method in table.methods.values():
            if method.row.port is not None and method.arity == "unary_unary":
                assert callable(method.encode_arguments)
                assert callable(method.decode_answer)


def test_a_client_has_the_signatures_and_words_of_the_port() -> None:
    for name, method in QUEUE.items():
        if method.row.port is not None:
            called = getattr(QueueClient, method.row.port.__name__)
            wanted = getattr(Queue, method.row.port.__name__)
            assert inspect.signature(called) == inspect.signature(wanted), name
            assert inspect.iscoroutinefunction(called)
    assert QueueClient.settle.__doc__ == Queue.settle.__doc__


def test_what_waits_and_what_works_on_a_stage_follows() -> None:
    assert QueueServicer.waits == {"Admit", "Attend", "Lease", "Take"}
    assert {name for name, each in QUEUE.items() if each.polls} == {"Lease", "Take"}
    assert {name for name, each in QUEUE.items() if each.of_stage} == {
        "Lease",
        "Renew",
        "Fail",
        "Release",
    }


def test_a_table_and_its_proto_have_the_same_methods() -> None:
    for rows in ((), (bare_row("GetStats"), bare_row("Stop"))):
        with pytest.raises(TypeError, match=r"differ in (GetStats|Stop)"):

            class Wrong(MethodTable, service=service(rollout_pb2.DESCRIPTOR, "Rollout")):
                by_hand = rows


def test_a_row_whose_arguments_its_request_lacks_is_a_mistake_of_the_program() -> None:
    class Wrong(MethodTable, service=service(rollout_pb2.DESCRIPTOR, "Rollout")):
        @row("GetStats")
        async def stats(self, run: str) -> Any: ...

    with pytest.raises(TypeError, match="has no field for run"):
        _ = Wrong.methods["GetStats"].encode_arguments


@pytest.mark.parametrize(
    ("name", "args", "more"),
    [
        ("Fail", ("r", "s", Uid("r", "t", 1), 4, Outcome.TIMEOUT, "late"), {}),
        ("Release", ("r", "s", {Uid("r", "t", 1): 3, Uid("r", "t", 2): 3}), {}),
        ("Publish", ("r", Version(1, 2)), {}),
        ("Filter", ("r",), {"epoch": 1, "uids": [Uid("r", "t", 0)], "reason": "old"}),
        ("Lease", (["r"], "s"), {"worker": "w", "limit": 2, "version": None, "wait_s": 0.5}),
    ],
)
def test_arguments_come_back(name: str, args: tuple[Any, ...], more: dict[str, Any]) -> None:
    method = QUEUE[name]
    assert method.row.port is not None
    bound = inspect.signature(method.row.port).bind(None, *args, **more)
    bound.apply_defaults()
    request = method.request.FromString(method.encode_arguments(*args, **more).SerializeToString())
    assert {"self": None, **method.decode_arguments(request)} == bound.arguments


def test_arguments_that_cannot_travel_or_make_no_sense_say_so() -> None:
    with pytest.raises(UserError, match="this settle request cannot be sent"):
        QUEUE["Settle"].encode_arguments("r\ud83d", epoch=0, step=0, batch_id="b")
    with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
        QUEUE["Take"].encode_arguments("r", step=0, more=1)
    with pytest.raises(UserError, match=r"malformed fail request: row\.uid is missing"):
        QUEUE["Fail"].decode_arguments(QUEUE["Fail"].request())


def test_every_servicer_has_a_table_whose_roles_are_asked() -> None:
    assert {servicer.table for servicer in SERVICERS} == set(TABLES)

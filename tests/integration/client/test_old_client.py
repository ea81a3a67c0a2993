"""A session that the client of commit 9121209e had with its queue, played as bytes to the queue of today.

A call or an answer that means something else now breaks clients out there: no reason to record the session anew.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass

from meshrl.v1 import queue_pb2 as pb
from meshrl.v1.errors_pb2 import ErrorDetail

from ...frozen_queue import FROZEN
from ...wire import Call, make_call, queue_server, read

VOLATILE = {"since_s", "local_socket"}
"""Fields of answers that say when and where they were given."""
SESSION = read(FROZEN / "client_session.json.xz")


def meaning(call: Call) -> Any:
    """The answer as a client reads it."""
    methods = pb.DESCRIPTOR.services_by_name["Queue"].methods_by_name
    answer = GetMessageClass(methods[call.method.rpartition("/")[2]].output_type)
    error = ErrorDetail.FromString(call.error)
    return {
        "method": call.method,
        "status": call.status,
        "error": [error.code, sorted(error.details)],
        "answers": [
            without(
                VOLATILE, MessageToDict(answer.FromString(reply), preserving_proto_field_name=True)
            )
            for reply in call.replies
        ],
    }


def without(names: set[str], value: Any) -> Any:
    """A message as a dictionary, without the fields of these names."""
    if isinstance(value, list):
        return [without(names, one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: without(names, one) for name, one in value.items() if name not in names}


async def test_every_call_of_an_old_client_gets_the_answer_that_it_got() -> None:
    async with queue_server() as address, grpc.aio.insecure_channel(address) as channel:
        for number, call in enumerate(SESSION):
            answered = await make_call(channel, call.method, call.requests)
            assert meaning(answered) == meaning(call), f"call {number}"


async def test_another_answer_would_be_seen() -> None:
    ledger = next(call for call in SESSION if call.method.endswith("GetLedger"))
    assert meaning(Call(ledger.method, [], [b""])) != meaning(ledger)

"""The methods of a service as rows of one table, from which client, servicer, identity, limits and metrics follow.

    class QueueTable(MethodTable, Queue, service=…):                one row per method of the .proto
        settle = row("Settle", TRAINER)(Queue.settle)
          │
          ├─ client: `await queue.settle("run", epoch=1, …)` is the call, with the port's signature
          ├─ servicer (servicers.py): the request's fields are the arguments of the port's method
          └─ `MethodTable.methods`: roles (identity.py), long polls (interceptors.py), bounds

Types, path and arity of a method are in the generated descriptor, how its values travel follows from the signature
(contract/codec/control.py). Streams are written by hand in client and servicer; their rows are here too.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from meshrl.contract.codec.bulk import Bulk, parser
from meshrl.contract.codec.control import Field, MessagePlan, codec_of, words
from meshrl.rpc.credentials import MeshRole

STAGES: Final = (MeshRole.ROLLOUT, MeshRole.REWARD, MeshRole.REFERENCE, MeshRole.STAGE)
"""The roles that work on rows, each on those of its own stages only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """Properties of a method that the .proto does not have."""

    name: str
    """In the .proto."""
    roles: frozenset[MeshRole]
    """Roles that may call it."""
    port: Callable[..., Coroutine[Any, Any, Any]] | None = None
    """The port's method; None: client and servicer have it by hand."""
    waits: bool = False
    """Whether it may wait long: it then ends with UnavailableError as soon as the server drains."""
    repeatable: bool = True
    """Calling twice has the effect of calling once, so clients repeat it."""
    answer_s: float | None = None
    """Seconds that an answer may take, where that is more than usual."""
    payload: bool = False
    """Its streamed messages have frames beside them (contract/codec/bulk.py)."""
    given: Mapping[str, Field] = field(default_factory=lambda: MappingProxyType({}))
    """Conversions of arguments that do not follow from their types."""
    reply: Field | None = None
    """Conversion of the answer, where it does not follow."""


class Wire:
    """A type of messages as bytes."""

    def __init__(self, message: type[Message], *, bulk: bool) -> None:
        """`bulk`: with payload beside the message."""
        self.serialize: Callable[[Any], bytes] = (Bulk if bulk else message).SerializeToString
        self.parse: Callable[[bytes], Any] = parser(message) if bulk else message.FromString


class Method:
    """A row beside its descriptor, and the conversions that follow from both."""

    def __init__(self, row: MethodRow, descriptor: MethodDescriptor) -> None:
        self.row = row
        self.descriptor = descriptor
        asks, answers = descriptor.client_streaming, descriptor.server_streaming
        self.arity = f"{'stream' if asks else 'unary'}_{'stream' if answers else 'unary'}"
        """gRPC's name of the arity."""
        self.path = f"/{descriptor.containing_service.full_name}/{descriptor.name}"
        self.request: type[Message] = GetMessageClass(descriptor.input_type)
        self.reply: type[Message] = GetMessageClass(descriptor.output_type)
        self.ask = Wire(self.request, bulk=row.payload and asks)
        self.answer = Wire(self.reply, bulk=row.payload and answers)
        fields = descriptor.input_type.fields_by_name
        self.polls = row.waits and "wait_s" in fields
        """Whether callers say how long they wait."""
        self.of_stage = "stage" in fields and not row.roles.isdisjoint(STAGES)
        """Whether its callers work on the rows of a stage, and on those of their own stages only."""

    @functools.cached_property
    def _arguments(self) -> MessagePlan:
        port = self.row.port
        assert port is not None, f"{self.path} is called by hand"
        _, *parameters = inspect.signature(port).parameters.values()
        hints = typing.get_type_hints(port)
        return MessagePlan(
            dict,
            self.request,
            {each.name: hints[each.name] for each in parameters},
            name=words(self.request.__name__),
            parameters=parameters,
            given=self.row.given,
        )

    @functools.cached_property
    def encode_arguments(self) -> Callable[..., Any]:
        """The request of a call's arguments. Raises UserError; TypeError as the port's method does."""
        return self._arguments.encode

    @functools.cached_property
    def decode_arguments(self) -> Callable[[Any], dict[str, Any]]:
        """The arguments of a request, by name. Raises UserError."""
        return self._arguments.decode

    @functools.cached_property
    def _answer(self) -> Field:
        if self.row.reply is not None:
            return self.row.reply
        assert self.row.port is not None, f"{self.path} is called by hand"
        hint = typing.get_type_hints(self.row.port)["return"]
        fields = self.reply.DESCRIPTOR.fields
        if hint is type(None):
            return Field(lambda _: self.reply(), lambda _: None)
        if hint is self.reply:
            return Field(lambda answer: answer, lambda answer: answer)
        if len(fields) != 1:
            pair = codec_of(hint, self.reply)
            return Field(pair.encode, pair.decode)
        [only] = fields
        value = inspect.Parameter(only.name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        plan = MessagePlan(
            lambda value: value,
            self.reply,
            {only.name: hint},
            name=words(self.reply.__name__),
            parameters=[value],
        )
        return Field(plan.encode, plan.decode)

    @functools.cached_property
    def encode_answer(self) -> Callable[[Any], Any]:
        """The message of an answer. Raises UserError."""
        assert self._answer.encode is not None
        return self._answer.encode

    @functools.cached_property
    def decode_answer(self) -> Callable[[Any], Any]:
        """The answer in a message. Raises UserError."""
        assert self._answer.decode is not None
        return self._answer.decode


class MethodTable:
    """The methods of one service; the base of its client.

    Raises:
        TypeError: a method of the .proto has no row, or a row no method.
    """

    service: ClassVar[ServiceDescriptor]
    methods: ClassVar[Mapping[str, Method]]
    """Methods by name in the .proto, in its order."""
    by_hand: ClassVar[Sequence[MethodRow]] = ()
    """Rows of methods that client and servicer have by hand, and that no port has."""

    def __init_subclass__(cls, *, service: ServiceDescriptor | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if service is None:
            return
        rows: list[MethodRow] = [*cls.by_hand]
        rows += [each.row for each in vars(cls).values() if hasattr(each, "row")]
        named: Mapping[str, MethodDescriptor] = service.methods_by_name
        cls.service = service
        if {row.name for row in rows} != {*named}:
            wrong = {row.name for row in rows} ^ {*named}
            raise TypeError(
                f"{service.full_name} and its table differ in {', '.join(sorted(wrong))}"
            )
        row_of = {row.name: row for row in rows}
        cls.methods = {name: Method(row_of[name], named[name]) for name in named}

    async def call_remote(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        """Call a method with the arguments of its port."""
        raise NotImplementedError


def service(file: FileDescriptor, name: str) -> ServiceDescriptor:
    """A service of a .proto."""
    found: ServiceDescriptor = file.services_by_name[name]
    return found


def bare_row(name: str, *roles: MeshRole, **more: Any) -> MethodRow:
    """A row without a port's method; `more` as in MethodRow. The operator may call every method."""
    return MethodRow(name=name, roles=frozenset((*roles, MeshRole.OPERATOR)), **more)

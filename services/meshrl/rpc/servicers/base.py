"""The base of every servicer: what a row of the table says needs no method here."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, ClassVar

import grpc

from meshrl.rpc.identity import require_stage
from meshrl.rpc.interceptors import Context, bounded, collected
from meshrl.rpc.methods import Table


class TableServicer:
    """Calls a port's methods with the fields of requests.

    A method that a subclass has, by its name in the .proto, is called instead:

        class TrainerServicer(TableServicer, table=TrainerTable): …
    """

    table: ClassVar[type[Table]]
    service: ClassVar[str]
    """Full name."""
    waits: ClassVar[frozenset[str]]
    """Names of methods that may wait long."""

    def __init_subclass__(cls, *, table: type[Table] | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if table is not None:
            cls.table = table
            cls.service = table.service.full_name
            cls.waits = frozenset(name for name, each in table.methods.items() if each.row.waits)

    def __init__(self, *ports: Any) -> None:
        """A method is called on the first of `ports` that has it."""
        self._ports = ports

    def attach(self, server: grpc.aio.Server) -> None:
        """Register the methods with `server`."""
        handlers = {
            name: getattr(grpc, f"{method.arity}_rpc_method_handler")(
                getattr(self, name, None) or partial(self._handle, name),
                request_deserializer=method.ask.parse,
                response_serializer=method.answer.serialize,
            )
            for name, method in self.table.methods.items()
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(self.service, handlers),)
        )

    async def _handle(self, name: str, request: Any, context: Context) -> Any:
        return await self.answer(name, request)

    async def answer(self, name: str, request: Any) -> Any:
        """Call the port's method of a row with the request's fields; return its answer as the row converts it."""
        method = self.table.methods[name]
        assert method.row.port is not None, (
            f"{method.path} has neither a port's method nor one here"
        )
        if method.of_stage:
            require_stage(request.stage)
        arguments = method.decode_arguments(request)
        if method.polls:
            arguments["wait_s"] = bounded(request.wait_s)
        called = method.row.port.__name__
        port = next(each for each in self._ports if hasattr(each, called))
        answer = getattr(port, called)(**arguments)
        return method.encode_answer(await answer if inspect.isawaitable(answer) else answer)

    async def collected(self, name: str, requests: AsyncIterator[Any]) -> list[Any]:
        """All messages of a streamed request. Raises CapacityError beyond the row's bound, BusyError."""
        return await collected(requests, self.table.methods[name].row.most_bytes)

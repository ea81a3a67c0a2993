"""The life of a gRPC service: bind, become ready, serve, drain, end.

    async with GrpcServer(settings, [servicer]) as server:   listens; health is NOT_SERVING
        ...load what the service needs...
        await server.ready()                                 health is SERVING
        await server.until_stopped()                         returns at SIGTERM or Ctrl-C; health is NOT_SERVING
        ...finish the work in progress...
                                                             at the end of the block: long polls end with
                                                             UnavailableError, other calls get `drain_grace_s`
A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self, cast

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from prometheus_client import CollectorRegistry
from pydantic import Field, NonNegativeFloat

from meshrl.common import process_guard, tracing
from meshrl.common.config import Config
from meshrl.common.files import lasting_fault
from meshrl.common.plain_text import say_error
from meshrl.common.process_guard import DRAIN_AT_EOF
from meshrl.common.sockets import Certificates, is_loopback, join_address
from meshrl.contract.errors import (
    BrokenDiskError,
    CapacityError,
    ForbiddenError,
    InfraError,
    MeshError,
    PartFailedError,
    UnauthenticatedError,
    UserError,
)
from meshrl.rpc import tls
from meshrl.rpc.call_limits import HEALTH_WATCH, CallLimits
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.errors import PortInUseError
from meshrl.rpc.exit_codes import Exit
from meshrl.rpc.http_server import serving_metrics
from meshrl.rpc.identity import Identity, RateLimit, TokenStore
from meshrl.rpc.interceptors import (
    CallMetrics,
    InterceptedHandlers,
    Interceptor,
    LongPolls,
    as_status,
    traced,
)
from meshrl.rpc.process_memory import reuse_freed_memory
from meshrl.rpc.transport import MAX_CONNECTIONS, SERVER_OPTIONS

log = logging.getLogger(__name__)

EXIT_INTERRUPTED: Final = 130


class NoProgressError(InfraError):
    """A service ends because its engine failed all the time and nothing was done. A restart may fail likewise."""


class ServerSettings(Config):
    """Addresses on which a service listens, and its shutdown."""

    host: str = "127.0.0.1"
    """The host name or IP address to bind."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free one."""
    metrics_port: int | None = Field(default=0, ge=0, le=65535)
    """Port of Prometheus' /metrics; 0 picks a free one, null serves no metrics."""
    drain_grace_s: NonNegativeFloat = 10.0
    """Seconds that running calls get to finish when the service ends."""
    allow_insecure_bind: bool = False
    """Accept unencrypted calls from any host. Use it only inside a network that you trust."""
    tls: Certificates = Certificates()
    """Certificates of this service. With `client_ca` it may bind any address."""
    authenticated: bool = False
    """The servicers check tokens themselves, so the service may bind any address."""
    verifiers: Path | None = None
    """Hashes of the credentials that callers must present (credentials.py). Null asks nobody: for libraries and tests
    on loopback; `up` and `serve` always set it."""
    certificate_roles: Mapping[str, MeshRole] = Field(default_factory=dict)
    """Role by the name of a client's certificate."""

    @property
    def identified(self) -> bool:
        """True if every call is asked who makes it."""
        return self.verifiers is not None or bool(self.certificate_roles)

    def identity(
        self,
        tokens: TokenStore | None = None,
        rates: Mapping[str, Sequence[RateLimit]] | None = None,
    ) -> Identity:
        """The callers that this service knows, `tokens` of a file beside the credentials of the run.

        Raises:
            ConfigError: the verifiers cannot be read.
        """
        return Identity(
            self.verifiers,
            certificates=self.certificate_roles,
            tokens=tokens,
            mutual=self.tls.mutual,
            rates=rates,
            asks=self.identified or tokens is not None,
        )


class Servicer(Protocol):
    """A servicer, as the server sees it."""

    @property
    def service(self) -> str:
        """The full name of the service, such as `meshrl.v1.Queue`."""
        ...

    @property
    def waits(self) -> frozenset[str]:
        """Names of methods that may wait long. They end with UnavailableError as soon as the server drains."""
        ...

    def attach(self, server: grpc.aio.Server) -> None:
        """Register the servicer with `server`."""
        ...


class GrpcServer:
    """One gRPC server with its servicers, health, reflection and metrics."""

    def __init__(
        self,
        settings: ServerSettings,
        servicers: Sequence[Servicer],
        *,
        interceptors: Sequence[Interceptor] = (),
        identity: Identity | None = None,
        limits: CallLimits | None = None,
    ) -> None:
        """Nothing listens before the context is entered.

        Args:
            settings: Where to listen.
            servicers: What to serve.
            interceptors: Wrap every call, inside of metrics, errors, identity and draining.
            identity: The callers that it knows; those of the settings if not given.
            limits: How much it holds at once.

        Raises:
            ConfigError: the verifiers cannot be read.
        """
        self.settings = settings
        self._identity = identity or settings.identity()
        self._interceptors = tuple(interceptors)
        self._limits = limits or CallLimits()
        self.port = settings.port
        """The port in use, once the context is entered."""
        self.metrics_port: int | None = settings.metrics_port
        self.registry = CollectorRegistry()
        """The Prometheus registry. Services register their own metrics here."""
        self._servicers = tuple(servicers)
        waits = (f"/{each.service}/{name}" for each in self._servicers for name in each.waits)
        self._long_polls = LongPolls({*waits, HEALTH_WATCH})
        self._stopping = asyncio.Event()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined] # unknown to its stubs
        self._grpc: grpc.aio.Server | None = None
        self._closing = AsyncExitStack()

    @property
    def address(self) -> str:
        """`host:port` for clients on this host."""
        return join_address(self.settings.host, self.port)

    async def __aenter__(self) -> Self:
        require_loopback(self.settings)
        tracer = (traced,) if tracing.is_on() else ()
        interceptors = (
            CallMetrics(self.registry).interceptor,
            as_status,
            self._limits.by_address,
            self._identity.interceptor,
            self._limits.by_role,
            self._long_polls.interceptor,
            *tracer,
            *self._interceptors,
        )
        handlers = InterceptedHandlers(interceptors)
        names = self._attach_to(cast("grpc.aio.Server", handlers))
        self._grpc = grpc.aio.server(
            handlers=[handlers], options=(*SERVER_OPTIONS, *self._limits.options)
        )
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._grpc.stop, None)
            self.port = bind(self._grpc, self.settings)
            if self.settings.metrics_port is not None:
                self.metrics_port = await undo.enter_async_context(
                    serving_metrics(
                        self.registry,
                        self.settings.host,
                        self.settings.metrics_port,
                        self.settings.tls,
                        identity=self._identity,
                    )
                )
            await self._grpc.start()
            self._closing = undo.pop_all()
        log.info("serving %s on %s", ", ".join(names[:-1] or names), self.address)
        return self

    async def __aexit__(self, *raised: object) -> None:
        try:
            await self.drain()
        finally:
            await self._closing.aclose()

    def _attach_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """Register health, servicers and reflection. Returns the services' names, without reflection's."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for servicer in self._servicers:
            servicer.attach(server)
        names = [*(servicer.service for servicer in self._servicers), health.SERVICE_NAME]
        reflector = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined] # unknown to its stubs
            [*names, reflection.SERVICE_NAME]
        )
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflector, server)
        return names

    async def ready(self) -> None:
        """Set health to SERVING."""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def stop(self) -> None:
        """Make `until_stopped` return, as the first signal does."""
        self._stopping.set()

    async def until_stopped(self) -> None:
        """Wait for `stop`, SIGTERM or Ctrl-C; with `DRAIN_AT_EOF`, for the end of the input instead of SIGTERM.

        Health is NOT_SERVING on return.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
            self._closing.callback(loop.remove_signal_handler, number)
        if DRAIN_AT_EOF in os.environ:
            loop.add_reader(sys.stdin.fileno(), self._on_input)
            self._closing.callback(loop.remove_reader, sys.stdin.fileno())
        await self._stopping.wait()
        await self._health.enter_graceful_shutdown()

    async def drain(self) -> None:
        """Refuse new calls, end long polls, give other calls `drain_grace_s`. Idempotent."""
        if self._grpc is None:
            return
        await self._health.enter_graceful_shutdown()
        self._long_polls.end()
        await self._grpc.stop(self.settings.drain_grace_s)

    def _on_input(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            log.info("end of input: draining")
            self._stopping.set()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTERM and DRAIN_AT_EOF in os.environ:
            log.info("SIGTERM: the end of the input will say when to drain")
            return
        if self._stopping.is_set():
            log.warning("second signal: ending at once")
            logging.shutdown()
            os._exit(128 + number)
        level = logging.DEBUG if process_guard.supervised else logging.INFO
        log.log(level, "%s: draining", signal.Signals(number).name)
        self._stopping.set()

    async def _set_health(self, status: int) -> None:
        for name in ("", *(servicer.service for servicer in self._servicers)):
            await self._health.set(name, status)


def require_loopback(settings: ServerSettings) -> None:
    """Raises UserError for a host that other machines can reach, unless the settings permit it.

    They do if a caller needs a certificate, a credential over an encrypted connection, or if nothing is needed on
    purpose.
    """
    if is_loopback(settings.host) or settings.tls.mutual:
        return
    if settings.authenticated or (settings.identified and settings.tls.cert is not None):
        return
    calls = "not encrypted" if settings.identified else "not authenticated"
    loss = (
        "credentials included" if settings.identified else "and anybody in it may call every method"
    )
    permit_insecure(
        settings,
        f"host {settings.host!r} can be reached from other machines, and calls are {calls}: "
        "bind 127.0.0.1, set tls.cert and tls.key, or set allow_insecure_bind in a network that you trust",
        f"INSECURE: {settings.host} can be reached from other machines and nothing is encrypted: anyone who can "
        f"listen in that network reads everything, {loss}",
        host=settings.host,
    )


def permit_insecure(
    settings: ServerSettings, problem: str, warning: str, **details: object
) -> None:
    """Raises UserError with `problem` and `details`, or logs `warning` where `allow_insecure_bind` permits it."""
    if not settings.allow_insecure_bind:
        raise UserError(problem, **details)
    log.warning("%s", warning)


def bind(server: grpc.aio.Server, settings: ServerSettings) -> int:
    """Bind, and return the port. Raises UserError with address and reason."""
    address = join_address(settings.host, settings.port)
    try:
        port = tls.add_port(server, address, settings.tls)
    except RuntimeError as error:
        raise _bind_error(settings, address) from error
    if port == 0:
        raise _bind_error(settings, address)
    return port


def _bind_error(settings: ServerSettings, address: str) -> UserError:
    """Binds a plain socket to learn the reason, since gRPC says only that it failed."""
    why = "the address was refused"
    kind_of_error = UserError
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            kind_of_error = PortInUseError
            why = "the port is in use; stop the process that has it, or choose another port (0 picks a free one)"
    return kind_of_error(f"cannot listen on {address}: {why}", address=address)


CODES: Final[Mapping[type[MeshError], Exit]] = {
    NoProgressError: Exit.NO_PROGRESS,
    PartFailedError: Exit.PART_FAILED,
    PortInUseError: Exit.PORT_IN_USE,
    UserError: Exit.USER_ERROR,
    CapacityError: Exit.REFUSED,
    UnauthenticatedError: Exit.REFUSED,
    ForbiddenError: Exit.REFUSED,
    BrokenDiskError: Exit.REFUSED,
}
"""Exit codes by kind of error; the first kind that an error is of counts."""


def run_service(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run `main` on uvloop and return the exit code.

    A MeshError is printed as one line, without a traceback, and so is a lasting error of the machine.
    """
    reuse_freed_memory()
    _allow_files()
    try:
        uvloop.run(main())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseExceptionGroup as group:
        reasons, rest = group.split(_is_told)
        if rest is not None or reasons is None:
            raise
        return _report(_first(reasons))
    except Exception as error:
        if not _is_told(error):
            raise
        return _report(error)
    return 0


def _allow_files() -> None:
    """Raise the soft limit of open files, often 1,024, to what MAX_CONNECTIONS needs, if the hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (
        2 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * MAX_CONNECTIONS, hard)
    )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _is_told(error: BaseException) -> bool:
    """Whether it is printed as one line, without a traceback."""
    return isinstance(error, MeshError) or bool(lasting_fault(error))


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _report(error: BaseException) -> int:
    """Say why a service ended, and give its exit code."""
    fault = lasting_fault(error)
    say_error(error if isinstance(error, MeshError) else fault)
    for kind, code in CODES.items():
        if isinstance(error, kind):
            return code
    return Exit.REFUSED if fault else Exit.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext:
    """Arguments of a service from `meshrl serve`."""

    name: str
    """Unique in the mesh and the same after a restart; it identifies leases and replicas."""
    settings: ServerSettings
    kind: str = ""
    """The kind of service: a built-in one, or the name of a stage of the recipe."""
    node_rank: int = 0
    """Which machine of the service this is, of one that has several."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Address (`host:port`) by kind of service (`queue`, `trainer`)."""
    accept_changes: bool = False
    """The run may continue with other data, another model or another reward than it began with."""

    def address_of(self, kind: str) -> str:
        """The address of a service. Raises UserError if it is unknown."""
        if kind not in self.addresses:
            raise UserError(
                f"{self.name} must reach the {kind} service: give --{kind} HOST:PORT or --address-book FILE"
            )
        return self.addresses[kind]

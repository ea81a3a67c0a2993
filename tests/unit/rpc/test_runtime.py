"""A server binds, becomes ready, is watched, drains and ends, reports a failure in one line, and stays small."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from meshrl.common import process_guard
from meshrl.common.process_guard import DRAIN_AT_EOF
from meshrl.contract.errors import (
    CapacityError,
    ForbiddenError,
    InfraError,
    MeshError,
    UnauthenticatedError,
    UserError,
)
from meshrl.rpc.exit_codes import Exit
from meshrl.rpc.process_memory import collect_garbage_rarely
from meshrl.rpc.runtime import GrpcServer, ServerSettings, run_service
from meshrl.rpc.servicers import RewardServicer, TrainerServicer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("meshrl.v1.Reward", "meshrl.v1.Trainer")


def serve(**settings: object) -> GrpcServer:
    # The servicers are never called: health, reflection and metrics belong to the server.
    servicers = [RewardServicer(None), TrainerServicer(None)]  # type: ignore[arg-type]
    return GrpcServer(ServerSettings.model_validate({"drain_grace_s": 1} | settings), servicers)


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)).status


async def test_health_follows_ready_and_stop() -> None:
    async with serve() as server, grpc.aio.insecure_channel(server.address) as channel:
        for service in ("", *SERVICES):
            assert await health_of(channel, service) == NOT_SERVING
        await server.ready()
        for service in ("", *SERVICES):
            assert await health_of(channel, service) == SERVING
        server.stop()
        await server.until_stopped()
        assert await health_of(channel, "meshrl.v1.Reward") == NOT_SERVING


async def test_reflection_lists_the_services() -> None:
    async with serve() as server, grpc.aio.insecure_channel(server.address) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = stub.ServerReflectionInfo(iter([request]), timeout=60)
        names = [
            service.name
            async for answer in answers
            for service in answer.list_services_response.service
        ]
    assert {*SERVICES, "grpc.health.v1.Health"} <= set(names)


async def test_a_server_without_a_service_of_its_own_says_what_it_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with GrpcServer(ServerSettings(), []) as server:
        assert f"serving grpc.health.v1.Health on {server.address}" in caplog.text


async def test_metrics_count_calls_by_method_and_status() -> None:
    async with serve() as server, grpc.aio.insecure_channel(server.address) as channel:
        await health_of(channel, "")
        with pytest.raises(grpc.aio.AioRpcError):
            await health_of(channel, "no.such.Service")
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        with await asyncio.to_thread(urllib.request.urlopen, url) as page:
            text = page.read().decode()
    check = 'method="/grpc.health.v1.Health/Check"'
    assert f'meshrl_rpc_total{{{check},status="OK"}} 1.0' in text
    assert f'meshrl_rpc_total{{{check},status="NOT_FOUND"}} 1.0' in text
    assert f"meshrl_rpc_seconds_count{{{check}}} 2.0" in text


async def test_a_watcher_of_health_does_not_delay_the_drain() -> None:
    server = await serve(drain_grace_s=60, metrics_port=None).__aenter__()
    async with grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        first = await watch.read()
        assert first.status == NOT_SERVING
        async with asyncio.timeout(120):
            await server.drain()
        assert await watch.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_port_in_use_is_one_line_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: the port is in use"):
            await serve(port=port).__aenter__()
        with pytest.raises(UserError, match=f"metrics on 127.0.0.1:{port}"):
            await serve(metrics_port=port).__aenter__()


async def test_an_address_of_another_host_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"192\.0\.2\.1:0: Cannot assign"):
        await serve(host="192.0.2.1", allow_insecure_bind=True).__aenter__()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "example.org", "10.0.0.1"])
async def test_an_address_that_other_machines_reach_needs_permission(host: str) -> None:
    with pytest.raises(UserError, match="allow_insecure_bind"):
        await serve(host=host).__aenter__()


async def test_a_server_may_listen_on_every_address_with_permission() -> None:
    everywhere = serve(host="0.0.0.0", allow_insecure_bind=True, metrics_port=None)
    async with everywhere, grpc.aio.insecure_channel(f"127.0.0.1:{everywhere.port}") as channel:
        assert await health_of(channel, "") == NOT_SERVING


@pytest.mark.parametrize("key", ["port", "metrics_port"])
def test_a_port_that_was_taken_after_it_was_chosen_has_an_exit_code_of_its_own(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:

        async def main() -> None:
            await serve(**{key: taken.getsockname()[1]}).__aenter__()

        assert run_service(main) == Exit.PORT_IN_USE
    assert "in use" in capsys.readouterr().err


def test_a_mistake_ends_a_service_with_one_line_and_code_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def main() -> None:
        raise UserError("no such file: x.yaml")

    assert run_service(main) == 2
    assert capsys.readouterr().err == "error: no such file: x.yaml\n"


def test_a_failure_inside_a_task_group_is_one_line_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def fail() -> None:
        raise InfraError("the disk is gone")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    assert run_service(main) == 1
    assert capsys.readouterr().err == "error: the disk is gone\n"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "/a/b"), "/a/b: No such file or"),
        (OSError(28, "No space left on device", "/dev/shm/x"), "/dev/shm/x: No space left on"),
        (PermissionError(13, "Permission denied", "key.pem"), "key.pem: Permission denied"),
        (CapacityError("no space left in checkpoints"), "no space left in checkpoints"),
        (UnauthenticatedError("this token is unknown here"), "this token is unknown here"),
        (ForbiddenError("a reader may not do this"), "a reader may not do this"),
        (
            RuntimeError("unable to write to file </torch_1>: No space left on device (28)\nmore"),
            "unable to write to file </torch_1>: No space left on device (28)\n",
        ),
        (InfraError("checkpoint 7: Disk quota exceeded"), "checkpoint 7: Disk quota exceeded"),
    ],
)
def test_what_the_machine_refuses_for_good_has_a_code_of_its_own(
    error: Exception, line: str, grouped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        raise ExceptionGroup("several", [error]) if grouped else error

    assert run_service(main) == Exit.REFUSED
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_a_connection_that_breaks_is_none_of_these() -> None:
    async def main() -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    with pytest.raises(ConnectionResetError):
        run_service(main)


def test_a_bug_is_not_hidden() -> None:
    async def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_service(main)
    assert not issubclass(ZeroDivisionError, MeshError)


SERVICE = """
import asyncio, logging, sys
from meshrl.rpc.servicers import RewardServicer
from meshrl.rpc.runtime import GrpcServer, ServerSettings, run_service

async def main():
    async with GrpcServer(ServerSettings(metrics_port=None), [RewardServicer(None)]) as server:
        assert "uvloop" in type(asyncio.get_running_loop()).__module__
        await server.ready()
        waiting = asyncio.create_task(server.until_stopped())
        await asyncio.sleep(0)
        print("ready", flush=True)
        await waiting
        print("stopped", flush=True)
        if "hang" in sys.argv:
            await asyncio.sleep(600)
    print("drained", flush=True)

sys.exit(run_service(main))
"""


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, *arguments], stdout=subprocess.PIPE, text=True, **options
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_service(number: signal.Signals) -> None:
    with start() as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
    assert (out, process.returncode) == ("stopped\ndrained\n", 0)


def test_a_service_of_a_supervisor_elsewhere_drains_at_the_end_of_its_input_only() -> None:
    told = {**os.environ, DRAIN_AT_EOF: "1"}
    with start(stdin=subprocess.PIPE, env=told) as process:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        out, _ = process.communicate(timeout=120)
    assert (out, process.returncode) == ("stopped\ndrained\n", 0)


def test_a_second_signal_ends_it_at_once() -> None:
    with start("hang") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    assert (out, process.returncode) == ("", 128 + signal.SIGTERM)


@pytest.mark.parametrize("supervised", [True, False])
async def test_whoever_ended_a_service_says_so_and_not_each_service_too(
    supervised: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_guard, "supervised", supervised)
    caplog.set_level(logging.INFO)
    serve()._on_signal(signal.SIGTERM)
    assert ("SIGTERM: draining" in caplog.text) is not supervised


ARENAS = """
import ctypes, threading
from meshrl.rpc.process_memory import limit_malloc_arenas

limit_malloc_arenas()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
threads = 8
together = threading.Barrier(threads)

def use() -> None:
    together.wait()
    blocks = [bytearray(5_000) for _ in range(100)]
    together.wait()

workers = [threading.Thread(target=use) for _ in range(threads)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


class Cycle:
    """A small copy of the cycle that gRPC leaves behind for each call."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
def test_cycles_of_calls_do_not_accumulate() -> None:
    collect_garbage_rarely()
    for _ in range(40_000):
        Cycle()
    # Compares types, because isinstance on other libraries' objects may raise their warnings.
    assert sum(type(each) is Cycle for each in gc.get_objects()) <= 10_001


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="another libc")
def test_threads_share_two_arenas() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ARENAS], capture_output=True, text=True, timeout=120, check=True
    )
    assert 1 <= ran.stdout.count("<heap nr=") <= 2

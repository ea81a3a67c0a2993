"""Boxes of every backend: what a command may do, what it cannot reach, and what is left when a box ends."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import unittest.mock
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.config import read_options
from meshrl.contract.errors import (
    ConfigError,
    MeshError,
    NotFoundError,
    UnavailableError,
    UserError,
)
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers import bubblewrap
from meshrl.rollout.containers.box import (
    OUTPUT_BYTES,
    Backend,
    Box,
    BoxLimits,
    Image,
    ImageError,
    Output,
    owner,
)
from meshrl.rollout.containers.bubblewrap import HOST, Bubblewrap
from meshrl.rollout.containers.pool import build_backend

from ..waiting import until

LIMITS = BoxLimits(processes=40, disk_bytes=8 << 20, memory_bytes=256 << 20)
STORE = Path(f"/var/tmp/meshrl-test-images-{os.geteuid()}")
"""Shared by the tests, below no folder that is closed to the boxes' user."""
HOST_IMAGE = Image(name=HOST)
ENGINE_IMAGE = Image(name="localhost/meshrl-test:2")
"""A static busybox, as `sh`, `ls` and so on."""
KINDS = ("bubblewrap", "podman", "docker", "kubernetes")
IMAGES = dict.fromkeys(KINDS, ENGINE_IMAGE) | {"bubblewrap": HOST_IMAGE}


def image_of(backend: Backend) -> Image:
    return HOST_IMAGE if isinstance(backend, Bubblewrap) else ENGINE_IMAGE


def busybox_folder() -> Path:
    """A folder with a Dockerfile for ENGINE_IMAGE. Raises ImageError."""
    busybox = shutil.which("busybox")
    if busybox is None or subprocess.run(["ldd", busybox], capture_output=True).returncode == 0:
        raise ImageError("there is no static busybox here (the package busybox-static)")
    folder = STORE / "busybox"
    folder.mkdir(parents=True, exist_ok=True)
    names = subprocess.run([busybox, "--list"], capture_output=True, text=True).stdout.split()
    with tarfile.open(folder / "root.tar", mode="w") as archive:
        archive.add(busybox, "bin/busybox")
        for name in set(names) - {"busybox"}:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        for name in ("etc", "home", "root", "tmp", "var/tmp", "mnt"):
            made = tarfile.TarInfo(name)
            made.type, made.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(made)
    (folder / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
    return folder


@functools.cache
def cluster() -> Any:
    """An API server whose pods run here, as the one of the current kubeconfig. Raises ImageError, OSError."""
    if os.geteuid() != 0 or not (shutil.which("bwrap") and shutil.which("nsenter")):
        raise ImageError("pods of the stand-in need root, bwrap and nsenter")
    try:
        from kubernetes.config import kube_config

        from ..doubles.kubernetes_api import KubernetesApi
    except ImportError as error:
        raise ImageError(str(error)) from error
    folder = Path(tempfile.mkdtemp(prefix="meshrl-pods-"))
    with tarfile.open(busybox_folder() / "root.tar") as archive:
        archive.extractall(folder / "image", filter="tar")
    api = KubernetesApi(folder, folder / "image")
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = str(folder / "kubeconfig")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(api.close)
    return api


async def backend_of(kind: str) -> Backend:
    """A backend with its image prepared. Raises ConfigError, ImageError, UnavailableError, OSError."""
    if kind == "kubernetes":
        await asyncio.to_thread(cluster)
    made = build_backend(ContainersConfig.model_validate({"backend": kind, "store": STORE}))
    image = IMAGES[kind]
    if kind in ("podman", "docker"):
        image = replace(image, build=await asyncio.to_thread(busybox_folder))
    await made.prepare(image)
    return made


WHY_NOT: dict[str, str] = {}
"""Why no box of a kind starts here; empty where one does."""


async def skip_without(kind: str) -> None:
    if kind not in WHY_NOT:
        try:
            backend = await backend_of(kind)
            await (await backend.start(IMAGES[kind], LIMITS, row="probe")).close()
            await backend.close()
            WHY_NOT[kind] = ""
        except (MeshError, OSError) as error:
            WHY_NOT[kind] = f"no box of {kind} starts here: {error}"
    if WHY_NOT[kind]:
        pytest.skip(WHY_NOT[kind])


@pytest.fixture(params=KINDS)
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    await skip_without(request.param)
    made = await backend_of(request.param)
    yield made
    await made.close()


@pytest.fixture
async def box(backend: Backend) -> AsyncIterator[Box]:
    started = await backend.start(image_of(backend), LIMITS, row="run/t0/0")
    yield started
    await started.close()


@pytest.fixture
async def strict() -> AsyncIterator[Box]:
    """A box of bubblewrap with this machine's Python."""
    await skip_without("bubblewrap")
    started = await (await backend_of("bubblewrap")).start(HOST_IMAGE, LIMITS, row="run/t0/0")
    yield started
    await started.close()


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def shell(box: Box, script: str, timeout_s: float = 60.0) -> tuple[int, str]:
    finished = await box.run(["sh", "-c", script], timeout_s=timeout_s)
    return finished.exit_code, finished.output.decode()


async def python(box: Box, code: str) -> str:
    finished = await box.run(["/usr/bin/env", "python3", "-c", code], timeout_s=60.0)
    return finished.output.decode()


async def test_a_command_tells_its_exit_code_and_prints_both_streams_in_order(box: Box) -> None:
    assert await shell(box, "echo a; echo b >&2; echo c; exit 7") == (7, "a\nb\nc\n")
    assert await shell(box, "kill -TERM $$") == (128 + signal.SIGTERM, "")
    assert await shell(box, "id -u; pwd; hostname") == (0, "0\n/\nbox\n")


async def test_a_command_gets_its_folder_variables_and_input(box: Box) -> None:
    finished = await box.run(
        ["sh", "-c", 'pwd; echo "$X"; cat'],
        timeout_s=60.0,
        stdin=b"in" * 100_000,
        folder="/tmp",
        variables={"X": "a b"},
    )
    assert finished.output.startswith(b"/tmp\na b\nininin")
    unread = await box.run(["true"], timeout_s=60.0, stdin=b"in" * 1_000_000)
    assert unread.exit_code == 0


async def test_a_command_that_cannot_start_says_why(box: Box) -> None:
    missing = await box.run(["nope"], timeout_s=60.0)
    assert missing.exit_code == 127 and b"nope: " in missing.output
    nowhere = await box.run(["ls"], timeout_s=60.0, folder="/nowhere")
    assert nowhere.exit_code == 127
    assert nowhere.output.endswith(b"/nowhere: No such file or directory\n")


async def test_files_stay_and_so_does_what_runs_in_the_background(box: Box) -> None:
    await shell(box, "echo hi > /root/kept; (sleep 1000; echo never) & echo $! > /root/pid")
    assert await shell(box, "cat /root/kept; kill -0 $(cat /root/pid) && echo runs") == (
        0,
        "hi\nruns\n",
    )


async def test_a_background_process_may_print_after_its_command_has_ended(box: Box) -> None:
    await shell(box, "(while [ ! -e /tmp/go ]; do :; done; seq 100000; touch /tmp/printed) &")
    await shell(box, "touch /tmp/go")
    await shell(box, "while [ ! -e /tmp/printed ]; do sleep 0.01; done")


async def test_long_output_is_cut_in_the_middle(box: Box) -> None:
    code, output = await shell(box, "seq 1000000")
    assert code == 0
    assert output.startswith("1\n2\n") and output.endswith("999999\n1000000\n")
    assert "bytes left out" in output and len(output) < OUTPUT_BYTES + 100


def test_output_that_fits_is_whole_and_a_longer_one_says_how_much_is_missing() -> None:
    output = Output(most=8)
    for part in (b"abc", b"defgh"):
        output.add(part)
    assert output.text() == b"abcdefgh"
    output.add(b"ijk")
    assert output.text() == b"abcd\n[... 3 bytes left out ...]\nhijk"


async def test_a_command_that_does_not_end_is_ended_with_what_it_started(box: Box) -> None:
    finished = await box.run(["sh", "-c", "echo began; sleep 1000; echo no"], timeout_s=0.5)
    assert (finished.timed_out, finished.output) == (True, b"began\n")
    assert "(sleep) S" not in (await shell(box, "cat /proc/[0-9]*/stat"))[1]


async def test_a_call_that_is_cancelled_ends_its_command(box: Box) -> None:
    call = asyncio.create_task(shell(box, "touch /tmp/began; exec sleep 1000"))
    await shell(box, "while [ ! -e /tmp/began ]; do sleep 0.01; done")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await shell(box, "while grep -q sleep /proc/[3-9]*/comm; do :; done; true")


async def test_files_and_folders_go_in_and_come_out(box: Box, tmp_path: Path) -> None:
    (tmp_path / "tree/deep").mkdir(parents=True)
    (tmp_path / "tree/deep/a.sh").write_text("echo hello")
    (tmp_path / "tree/deep/a.sh").chmod(0o755)
    (tmp_path / "tree/link").symlink_to("deep/a.sh")
    await box.put(tmp_path / "tree", "/work/here")
    assert await shell(box, "/work/here/link; stat -c %u:%a /work/here/deep/a.sh") == (
        0,
        "hello\n0:755\n",
    )
    await box.put(tmp_path / "tree/deep/a.sh", "/work/here/b")
    assert await box.get("/work/here/b", 100) == b"echo hello"
    with pytest.raises(UserError, match="longer than 4 bytes"):
        await box.get("/work/here/b", 4)
    with pytest.raises(UserError, match="absolute path below /"):
        await box.put(tmp_path / "tree", "/work/../..")


async def test_what_lies_at_the_target_is_replaced_and_no_link_there_is_followed(
    box: Box, tmp_path: Path
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test.sh").write_text("true")
    await shell(box, "mkdir /mine; echo keep > /mine/a; ln -s /mine /tests")
    await box.put(tmp_path / "tests", "/tests")
    assert await shell(box, "ls /mine /tests; test -L /tests") == (
        1,
        "/mine:\na\n\n/tests:\ntest.sh\n",
    )
    await shell(box, "touch /tests/conftest.py")
    await box.put(tmp_path / "tests", "/tests")
    assert await shell(box, "ls /tests") == (0, "test.sh\n")


@pytest.mark.parametrize("made", ["ln -s /etc/passwd /out", "mkfifo /out", "mkdir /out", "true"])
async def test_only_a_regular_file_comes_out(box: Box, made: str) -> None:
    await shell(box, made)
    with pytest.raises(NotFoundError, match="/out is not a regular file"):
        await box.get("/out", 100)


async def test_a_full_disk_is_told_and_goes_no_further(strict: Box, tmp_path: Path) -> None:
    filled = "cat /dev/zero > /big; cat /dev/zero > /dev/shm/big; cat /dev/zero > /dev/big; true"
    _, said = await shell(strict, filled)
    assert said.count("No space left") >= 1
    _, sizes = await shell(strict, "wc -c /big /dev/shm/big | tail -1")
    assert int(sizes.split()[0]) <= LIMITS.disk_bytes
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    with pytest.raises(UserError, match="No space left"):
        await strict.put(tmp_path / "file", "/file")


async def test_processes_and_memory_are_limited(strict: Box) -> None:
    _, said = await shell(strict, "for i in $(seq 100); do sleep 1000 & done")
    assert "fork" in said.lower()
    await strict.stop_processes()
    assert "MemoryError" in await python(strict, "bytearray(1 << 30)")


async def test_nothing_survives_a_stop_and_files_do(strict: Box) -> None:
    bomb = "setsid sh -c 'trap \"\" TERM HUP INT; while :; do (date > /tmp/last) & done' &"
    await shell(strict, f"echo kept > /root/kept; {bomb} setsid sleep 1000 & ")
    await strict.stop_processes()
    names = (await shell(strict, "cat /proc/[0-9]*/comm; cat /root/kept"))[1].split()
    assert sorted(names) == ["kept", "sh", "sh"]  # who holds the box open, and this command


async def test_boxes_see_nothing_of_each_other_or_of_their_image(
    backend: Backend, box: Box
) -> None:
    other = await backend.start(image_of(backend), LIMITS, row="run/t0/1")
    try:
        await shell(box, "echo secret > /etc/mine; rm -rf /home /root; sleep 1000 &")
        assert await shell(other, "ls -d /home /root") == (0, "/home\n/root\n")
        assert (await shell(other, "cat /etc/mine"))[0] == 1
        assert "sleep" not in (await shell(other, "cat /proc/[0-9]*/comm"))[1]
    finally:
        await other.close()
    again = await backend.start(image_of(backend), LIMITS, row="run/t0/2")
    assert await shell(again, "ls -d /home") == (0, "/home\n")
    await again.close()


async def test_a_box_knows_no_variable_file_or_process_of_the_machine(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_TOKEN", "secret-token")
    (tmp_path / "secret").write_text("secret")
    _, said = await shell(box, f"env; cat {tmp_path}/secret; cat /proc/*/environ; ls /proc/1/root")
    assert "secret-token" not in said
    assert "No such file" in said
    pids = (await shell(box, "cd /proc; echo [0-9]*"))[1].split()
    assert len(pids) <= 4
    seen = (await shell(box, "ls -A / /root /home /tmp /var/tmp"))[1]
    assert "meshrl-test" not in seen


async def test_a_box_reaches_no_service_of_the_mesh(strict: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        named.bind("\0meshrl-test-boxes")
        named.listen()
        port = server.getsockname()[1]
        said = await python(
            strict,
            f"""
import socket
def attempt(family, address):
    try:
        socket.socket(family).connect(address)
        print("reached", address)
    except OSError as error:
        print("refused", error.errno)
attempt(socket.AF_INET, ("127.0.0.1", {port}))
attempt(socket.AF_INET, ("10.0.0.1", 80))
attempt(socket.AF_UNIX, "\\0meshrl-test-boxes")
attempt(40, (2, 1))
""",
        )
    assert said.split()[::2] == ["refused"] * 4, said


async def test_a_listener_on_the_loopback_of_a_box_is_reached_by_its_processes_alone(
    backend: Backend, box: Box
) -> None:
    if type(box).__name__ == "PodBox":
        with pytest.raises(UserError, match="cannot listen"):
            await box.listen()
        return
    other = await backend.start(image_of(backend), LIMITS, row="run/t0/1")
    with await box.listen() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        ask = f"echo hello | nc -w 5 127.0.0.1 {port}"
        if isinstance(backend, Bubblewrap):
            ask = f"bash -c 'echo hello > /dev/tcp/127.0.0.1/{port}'"
        assert (await shell(other, ask))[0] != 0
        listener.setblocking(False)
        asking = asyncio.create_task(shell(box, ask))
        async with asyncio.timeout(30):
            accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
        accepted.setblocking(True)
        with accepted:
            assert await asyncio.to_thread(accepted.recv, 9) == b"hello\n"
        await asking
    await other.close()
    files = open_files()
    with pytest.raises(UnavailableError):
        await other.listen()
    assert open_files() == files


ATTACKS = {
    "kill who holds the box open": "kill -9 2",
    "kill everybody": "kill -9 -1",
    "look into process 1": "cat /proc/1/environ",
    "look into who holds it open": "cat /proc/2/environ",
    "write to its stdin": "echo > /proc/2/fd/0",
    "write its memory": "dd if=/dev/zero of=/proc/2/mem count=1",
    "write its memory by its thread": "dd if=/dev/zero of=/proc/2/task/2/mem count=1",
    "write the memory of process 1": "dd if=/dev/zero of=/proc/1/mem count=1",
    "write it by its thread": "dd if=/dev/zero of=/proc/1/task/1/mem count=1",
    "uncover process 1": "umount /proc/1",
    "mount another /proc": "mount -t proc proc /mnt",
    "make a user namespace": "unshare -U true",
    "make a mount namespace": "unshare -m true",
    "mount": "mount -t tmpfs none /mnt",
    "take the root of process 1": "nsenter -t 1 -m true",
    "write the kernel's settings": "echo x > /proc/sys/kernel/core_pattern",
    "write to the host's /usr": "touch /usr/bin/x",
    "make a device": "mknod /disk b 254 0",
    "read the kernel's log": "dmesg",
}


@pytest.mark.parametrize("script", ATTACKS.values(), ids=ATTACKS.keys())
async def test_an_attack_by_shell_fails(strict: Box, script: str) -> None:
    assert (await shell(strict, script))[0] != 0
    assert await shell(strict, "echo alive") == (0, "alive\n")


CALLS = {
    "ptrace": "print(libc.ptrace(16, 2, 0, 0))",
    "a pidfd": "print(libc.syscall(434, 2, 0))",
    "a signal through /proc": "print(libc.syscall(424, os.open('/proc/2', 0), 9, None, 0))",
    "a queued signal": "print(libc.syscall(129, 2, 9, b'\\0' * 128))",
    "the owner of a pipe": "r, w = os.pipe(); print(libc.fcntl(r, 8, 2))",
    "a mount": "print(libc.mount(b'none', b'/mnt', b'tmpfs', 0, None))",
    "keys": "print(libc.syscall(250, 0, -3, 1))",
    "a bpf program": "print(libc.syscall(321, 0, None, 0))",
    "a socket to the host of this machine": "print(libc.socket(40, 1, 0))",
    "a ring": "print(libc.syscall(425, 1, b'\\0' * 128))",
}


@pytest.mark.parametrize("code", CALLS.values(), ids=CALLS.keys())
async def test_a_system_call_that_attacks_fails(strict: Box, code: str) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are x86-64's")
    said = await python(strict, f"import ctypes, os; libc = ctypes.CDLL(None); {code}")
    assert said.endswith("-1\n"), said
    assert await shell(strict, "echo alive") == (0, "alive\n")


async def test_a_box_that_is_closed_leaves_nothing_and_says_so(backend: Backend) -> None:
    box = await backend.start(image_of(backend), LIMITS, row="run/t0/0")
    await shell(box, "sleep 1000 & setsid sleep 1000 &")
    before = open_files()
    running = asyncio.create_task(shell(box, "touch /tmp/on; sleep 1000"))
    await shell(box, "while [ ! -e /tmp/on ]; do :; done")
    await box.close()
    await box.close()
    with pytest.raises(UnavailableError, match=box.name):
        await running
    for call in (shell(box, "true"), box.get("/etc/passwd", 9), box.stop_processes()):
        with pytest.raises(UnavailableError, match="has ended"):
            await call
    if isinstance(backend, Bubblewrap):  # the others keep connections
        assert open_files() <= before


async def test_a_box_ends_at_its_time(backend: Backend) -> None:
    box = await backend.start(image_of(backend), BoxLimits(time_s=0.3), row="run/t0/0")
    with pytest.raises(UnavailableError):
        while True:
            await box.run(["sleep", "1000"], timeout_s=1000.0)
    await box.close()


async def test_bad_images_are_told_in_one_line(tmp_path: Path) -> None:
    backend = Bubblewrap(STORE)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.tar").write_text("no tarball")
    for image, told in (
        (Image(name=str(tmp_path / "missing")), "no unpacked root and no tarball"),
        (Image(name=str(tmp_path / "empty")), "no root file system"),
        (Image(name=str(tmp_path / "notes.tar")), "cannot be unpacked"),
        (Image(name="x", build=tmp_path), "builds no Dockerfile"),
    ):
        with pytest.raises(ImageError, match=told):
            await backend.prepare(image)
    with pytest.raises(ImageError, match="not prepared"):
        await backend.start(Image(name="x"), LIMITS, row="")
    with pytest.raises(ConfigError, match=r"limits\.hosts.*want the name of a host"):
        read_options(
            ContainersConfig, {"limits": {"hosts": ["127.0.0.1"]}}, where="rollout.containers"
        )


@pytest.mark.parametrize("kind", ["podman", "docker"])
async def test_containers_die_with_their_worker_and_a_sweep_removes_what_is_left(kind: str) -> None:
    await skip_without(kind)
    engine: Any = await backend_of(kind)
    lasting = await engine.start(ENGINE_IMAGE, LIMITS, row="mine")
    command = [sys.executable, "-c", ENGINE_OWNER, kind, ENGINE_IMAGE.name]
    worker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    name = (await worker.stdout.readline()).decode().strip()
    assert name in names_in(engine)
    worker.kill()
    await worker.wait()
    await until(lambda: name not in names_in(engine))
    assert (await engine.sweep(), lasting.name in names_in(engine)) == (0, True)
    engine_module = sys.modules[type(engine).__module__]
    dead = owner() + "1"  # this pid, started at another time
    with unittest.mock.patch.object(engine_module, "owner", lambda: dead):
        left = await engine.start(ENGINE_IMAGE, LIMITS, row="dead")
    assert (await engine.sweep(), left.name in names_in(engine)) == (1, False)
    await lasting.close()
    await engine.close()


def names_in(engine: Any) -> list[str]:
    return [each.name for each in engine.client.containers.list(all=True, ignore_removed=True)]


ENGINE_OWNER = """
import asyncio, sys
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers.box import BoxLimits, Image
from meshrl.rollout.containers.pool import build_backend

async def main():
    backend = build_backend(ContainersConfig(backend=sys.argv[1]))
    box = await backend.start(Image(name=sys.argv[2]), BoxLimits(), row="x")
    print(box.name, flush=True)
    await box.run(["sleep", "1000"], timeout_s=1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["podman", "docker"])
async def test_an_image_that_is_not_to_be_built_tells_the_last_lines(
    kind: str, tmp_path: Path
) -> None:
    await skip_without(kind)
    engine = await backend_of(kind)
    (tmp_path / "Dockerfile").write_text(f"FROM {ENGINE_IMAGE.name}\nCOPY nowhere /there\n")
    with pytest.raises(ImageError, match=r"cannot be built:\n(.*\n)*.*nowhere"):
        await engine.prepare(Image(name="localhost/meshrl-broken:1", build=tmp_path))
    with pytest.raises(ImageError, match="cannot be had"):
        await engine.prepare(Image(name="localhost/meshrl-missing:1"))
    await engine.close()


@pytest.mark.parametrize("kind", ["podman", "docker"])
async def test_tools_that_a_policy_replaces_neither_survive_a_stop_nor_place_the_tests(
    kind: str, tmp_path: Path
) -> None:
    await skip_without(kind)
    engine = await backend_of(kind)
    box = await engine.start(ENGINE_IMAGE, LIMITS, row="x")
    try:
        await shell(box, "mkdir -p /tests && touch /tests/conftest.py; sleep 1000 &")
        for name in ("bash", "sleep", "rm", "mkdir", "tar"):
            await shell(box, f"printf '#!/bin/sh\nsleep 1000' > /bin/own; ln -sf own /bin/{name}")
        await box.stop_processes()
        (tmp_path / "test.sh").write_text("true")
        await box.put(tmp_path, "/tests")
        assert await shell(box, "cat /proc/[0-9]*/comm | grep -c sleep; ls /tests") == (
            0,
            "0\ntest.sh\n",
        )
    finally:
        await box.close()
        await engine.close()


@pytest.mark.parametrize("kind", ["podman", "docker"])
async def test_a_container_without_room_for_a_process_lasts(kind: str) -> None:
    await skip_without(kind)
    engine = await backend_of(kind)
    box = await engine.start(ENGINE_IMAGE, LIMITS, row="x")
    # A bash that cannot start a process ends after 15 s.
    assert (await shell(box, "(while :; do sleep 1000 & done); sleep 1000 & exec sleep 20"))[0] == 0
    await box.close()
    await engine.close()


async def test_a_sweep_removes_what_a_dead_worker_has_half_unpacked(tmp_path: Path) -> None:
    backend = Bubblewrap(tmp_path)
    dead = tmp_path / f"abc.{owner()}1.part"  # this pid, started at another time
    mine = tmp_path / f"abc.{owner()}.part"
    for part in (dead, mine):
        (part / "deep").mkdir(parents=True)
    await backend.sweep()
    assert not dead.exists() and mine.exists()


async def test_a_sweep_kills_what_bubblewrap_left_of_a_dead_worker_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = (f"meshrl-{owner()}1-0", f"meshrl-{owner()}-0", "meshrl-up")
    ready = "echo; exec -a $0 sleep 1000"
    held = [
        await asyncio.create_subprocess_exec("bash", "-c", ready, name, stdout=subprocess.PIPE)
        for name in names
    ]
    for each in held:
        assert each.stdout is not None
        await each.stdout.readline()
    await until(lambda: any(names[0] in line for line in commands()))
    late: list[subprocess.Popen[bytes]] = []

    def kill(pid: int, number: int) -> None:
        if not late:  # the first one has just made a child, after the list of processes was read
            late.append(subprocess.Popen([names[0], "1000"], executable=shutil.which("sleep")))
        os.kill(pid, number)

    monkeypatch.setattr(bubblewrap, "os", unittest.mock.Mock(wraps=os, kill=kill))
    assert await Bubblewrap(STORE).sweep() == 2
    assert await held[0].wait() == late[0].wait() == -signal.SIGKILL
    assert [each.returncode for each in held[1:]] == [None, None]
    for each in held[1:]:
        each.kill()
        await each.wait()


def commands() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return found

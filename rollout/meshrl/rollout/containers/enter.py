"""Opens a box around bubblewrap, and enters it: a process of its own, with the standard library only.

    enter.py open PARENT JSON     becomes bubblewrap: a writable layer in memory, then a shell that waits
    enter.py run PARENT JSON      a command in a running box; its exit code is the command's
    enter.py put|get|stop …       copies a tar file from stdin into it, a file to stdout, kills what runs there
    enter.py listen …             sends a socket that listens on the box's loopback to its own stdin, a socket

A process that enters first leaves root and the file system of the machine behind. A command then loses the rights
over its user namespace; the other forms run nothing of the box's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import socket
import stat
import struct
import sys
import tarfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ENTERED = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
CAPABILITY_VERSION_3 = 0x20080522
CAPABILITIES = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_NET_BIND_SERVICE": 10,
}
"""Rights that root has in a box, over what belongs to the box."""
LAST_CAPABILITY = 63
BYTES_A_FILE = 4 << 10
"""Bytes of the writable layer for each file in it."""
NICE = 5
STOP_S = 10.0
PROC = Path("/proc")
NOT_FOUND, REFUSED, OUTSIDE = 3, 4, 5
"""Exit codes of `put`, `get` and `stop`, and of what fails before it is in the box; the reason is on stderr."""
OF_HOLDER = "CAP_AUDIT_WRITE"
"""A right that only process 2 has: nothing in the box may look into it, or change it."""
HOLDER = 2
"""The pid of the shell that holds the box open; process 1 is bubblewrap's, and buries orphans."""
HOLD = "echo; read line"
"""Says that the box is there, and ends it with the worker."""
libc = ctypes.CDLL(None, use_errno=True)


class RefusedError(Exception):
    """The box, or the machine, does not allow it."""


def main() -> int:
    """One form of the command line; its exit code."""
    form, parent, request = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    if (user := request.get("user")) is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        if form == "open":
            _open(request)
        return _entered(form, parent, request)
    except (RefusedError, OSError) as error:
        print(error, file=sys.stderr)
        return OUTSIDE


def _open(request: dict[str, Any]) -> None:
    """Replace this process by bubblewrap over `lower` and a layer of `disk_bytes` in memory.

    The worker's death must not kill bubblewrap before that has let its child run, which would wait for ever. It asks
    for that signal itself afterwards; a worker that died earlier has closed the pipe that the shell reads.
    """
    user, group, mounted = os.geteuid(), os.getegid(), request["mounted"]
    _check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "a user namespace")
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    size = request["disk_bytes"]
    options = f"size={size},nr_inodes={max(1024, size // BYTES_A_FILE)},mode=755"
    _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "private mounts")
    os.chdir(request["lower"])
    _mount("tmpfs", mounted, options)
    for name in ("upper", "work", "root", "shm"):
        Path(mounted, name).mkdir()
    layers = f"lowerdir=.,upperdir={mounted}/upper,workdir={mounted}/work,userxattr"
    _mount("overlay", f"{mounted}/root", layers)
    os.chdir("/")
    os.environ.clear()
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    words = [request["name"], "--die-with-parent", "--unshare-ipc", "--unshare-pid"]
    words += ["--unshare-net", "--unshare-uts", "--hostname", "box", "--cap-drop", "ALL"]
    for name in (*CAPABILITIES, OF_HOLDER):
        words += ["--cap-add", name]
    words += ["--bind", f"{mounted}/root", "/", *request["binds"], "--proc", "/proc"]
    words += ["--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]  # bubblewrap's, without rights
    words += ["--dev", "/dev", "--remount-ro", "/dev", "--bind", f"{mounted}/shm", "/dev/shm"]
    os.execvp("bwrap", [*words, "--chdir", "/", "--", "/bin/sh", "-c", HOLD])


def _entered(form: str, parent: int, request: dict[str, Any]) -> int:
    """A child of this process in the box whose first process is `pidfd`; its exit code."""
    child = 0

    def end(number: int, frame: FrameType | None) -> None:
        for kill in (os.kill, os.killpg):  # it may not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.signal(signal.SIGTERM, end)
    _check(libc.setns(request["pidfd"], request.get("namespaces", ENTERED)), "the box")
    _die_with(parent)
    os.close(request["pidfd"])
    # From here on, every path leads to files of the box: no module is loaded any more.
    sys.path.clear()
    sys.meta_path.clear()
    child = os.fork()
    if child == 0:
        code = REFUSED
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            code = FORMS[form](request)
        except (RefusedError, OSError, RecursionError, tarfile.TarError) as error:
            os.write(2, str(error).encode(errors="replace"))
            if form == "get" and isinstance(error, FileNotFoundError):
                code = NOT_FOUND
        finally:
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _run(request: dict[str, Any]) -> int:
    """Become the command. Rights that bubblewrap took from process 1 are taken here again."""
    os.nice(NICE)
    limits = {
        resource.RLIMIT_NPROC: request["processes"],
        resource.RLIMIT_DATA: request["memory_bytes"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))
    kept = sum(1 << number for number in CAPABILITIES.values())
    for number in range(LAST_CAPABILITY + 1):
        if not kept >> number & 1:
            libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    header = struct.pack("II", CAPABILITY_VERSION_3, 0)
    sets = struct.pack("6I", kept, kept, 0, 0, 0, 0)
    _check(libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(sets)), "fewer rights")
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    if filter_ := bytes.fromhex(request["filter"]):
        buffer = ctypes.create_string_buffer(filter_, len(filter_))
        fprog = struct.pack("HP", len(filter_) // 8, ctypes.addressof(buffer))
        arguments = (SECCOMP_MODE_FILTER, ctypes.c_char_p(fprog), 0, 0)
        _check(libc.prctl(PR_SET_SECCOMP, *arguments), "the system call filter")
    os.dup2(1, 2)
    wrong = request["folder"]
    try:
        os.chdir(wrong)
        wrong = request["command"][0]
        os.execvpe(wrong, request["command"], request["variables"])
    except OSError as error:
        os.write(1, f"{wrong}: {error.strerror}\n".encode())
    return 127


def _put(request: dict[str, Any]) -> int:
    """Unpack the tar file on stdin: one file that becomes `target`, or what a folder `target` holds."""
    target = Path(request["target"])
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        if hasattr(tarfile, "tar_filter"):
            archive.extraction_filter = tarfile.tar_filter
        archive.extractall(target.parent)
    return 0


def _get(request: dict[str, Any]) -> int:
    """Write a regular file to stdout."""
    source, most = request["source"], request["most_bytes"]
    try:
        opened = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise FileNotFoundError(f"{source} is not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        raise FileNotFoundError(f"{source} is not a regular file")
    with os.fdopen(opened, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise RefusedError(f"{source} is longer than {most} bytes")
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return 0


def _stop(request: dict[str, Any]) -> int:
    """Kill the processes of the box. All are stopped first, so that none starts another one."""
    until = time.monotonic() + STOP_S
    kept = {1, HOLDER, os.getpid()}
    os.kill(-1, signal.SIGSTOP)
    while others := {int(path.name) for path in PROC.iterdir() if path.name.isdigit()} - kept:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise RefusedError(f"processes of the box do not end within {STOP_S:g} s")
        time.sleep(0.002)
    os.kill(HOLDER, signal.SIGCONT)
    return 0


def _listen(request: dict[str, Any]) -> int:
    """Listen where the sender of this process accepts; only the box's own processes can connect."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(fileno=0) as sender:
        socket.send_fds(sender, [b"-"], [listener.fileno()])
    return 0


FORMS = {"run": _run, "put": _put, "get": _get, "stop": _stop, "listen": _listen}


def _die_with(parent: int) -> None:
    """End with the process that started this one. The kernel forgets it where a process gets rights."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _mount(kind: str, where: str, options: str) -> None:
    flags, data = MS_NOSUID | MS_NODEV, options.encode()
    _check(libc.mount(kind.encode(), where.encode(), kind.encode(), flags, data), f"{kind} mount")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise RefusedError(f"this machine refuses {what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    sys.exit(main())

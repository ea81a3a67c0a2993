"""Hostile reward functions, and how each must end. The page docs/measurements/hostile-functions.md shows this list.

In a body `{victim}` is the pid of a process of the sandbox's user, `{marked}` a file of that user, `{socket}` a datagram
socket. The campaign looks afterwards whether they took harm.
"""
# ruff: noqa: E501

from __future__ import annotations

import sys
from dataclasses import dataclass

from meshrl.contract.types import Outcome

OK, FAULT, TIMEOUT = Outcome.OK, Outcome.INFRA_FAULT, Outcome.TIMEOUT
SECRET = "MESHRL_TEST_SECRET"
NEWER = sys.version_info >= (3, 12)


@dataclass(frozen=True)
class Attack:
    name: str
    body: str
    """Body of `compute_score` for the sample "bad", indented by eight spaces; "good" samples score 1."""
    outcome: Outcome
    reason: str = ""
    """Occurs in the reason."""
    reason_from_3_12: str = ""
    """Instead of it, from Python 3.12 on."""
    score: float = 0.0
    """Score of the bad sample, if it gets one: the attack had no effect."""
    head: str = ""
    """Runs at import."""
    weak: bool = True
    """Holds without bubblewrap too."""
    private_tmp: bool = False
    """Needs a /tmp with a limit of files: a user namespace with its own mounts."""

    @property
    def expected(self) -> str:
        """Expected part of the reason under this Python."""
        return self.reason_from_3_12 if self.reason_from_3_12 and NEWER else self.reason

    @property
    def source(self) -> str:
        lines = "\n".join(f"        {line}" for line in self.body.splitlines())
        return (
            f"import ctypes, os, re, signal, struct, subprocess, sys, threading, time\n{self.head}\n"
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            f"    if solution_str == 'bad':\n{lines}\n        return 0.0\n    return 1.0\n"
        )


ORDINARY = "libc = ctypes.CDLL(None, use_errno=True)\ndef quietly(call, *arguments):\n    try:\n        return call(*arguments)\n    except (OSError, AttributeError):\n        return None\n"
"""Head of attacks that try one way after the other."""
SIGINFO = "struct.pack('iiiiii', 9, 0, -1, 0, os.getpid(), os.getuid()) + bytes(128)"
X86 = "os.uname().machine == 'x86_64'"

OWN_ANSWER = """\
frame = sys._getframe()
while 'number' not in frame.f_locals:
    frame = frame.f_back
replies, number = frame.f_locals['self']._replies, frame.f_locals['number']
body = {body}
replies.write(struct.pack('>I', len(body)) + body)
time.sleep(60)
"""
"""Forges the answer that the service waits for."""

FORGE = """\
body = {body}
for descriptor in range(3, 64):
    try:
        os.write(descriptor, struct.pack('>I', {size}) + body)
    except OSError:
        pass
time.sleep(60)
"""

ATTACKS = [
    Attack("fork bomb", "while True:\n    os.fork()", FAULT, "BlockingIOError", weak=False),
    Attack(
        "threads without end",
        "while True:\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        FAULT,
        "can't start new thread",
    ),
    Attack("10 GB of memory", "held = bytearray(10 << 30)", FAULT, "MemoryError"),
    Attack(
        "memory that no limit counts",
        "ctypes.CDLL(None).memfd_create(b'x', 0) == -1 or sys.exit(1)\nctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) == -1 or sys.exit(2)",
        OK,
    ),
    Attack(
        "a full /tmp",
        "with open(os.environ['TMPDIR'] + '/x', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 20))",
        FAULT,
        "OSError",
    ),
    Attack(
        "a full /dev/shm",
        "with open('/dev/shm/x', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 20))",
        FAULT,
        "Error",
    ),
    Attack(
        "files without end",
        "held = []\nwhile True:\n    held.append(open('/dev/null'))",
        FAULT,
        "Too many open files",
    ),
    Attack("endless loop", "while True:\n    pass", TIMEOUT, "no score after 1 s"),
    Attack(
        "endless regular expression",
        "re.fullmatch('(a+)+b', 'a' * 60)",
        TIMEOUT,
        "no score after 1 s",
    ),
    Attack(
        "ignores SIGTERM, SIGINT and SIGALRM",
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):\n    signal.signal(number, signal.SIG_IGN)\nwhile True:\n    time.sleep(1)",
        TIMEOUT,
        "no score after 1 s",
    ),
    Attack(
        "kills its parent",
        "try:\n    os.kill(os.getppid(), signal.SIGKILL)\nexcept PermissionError:\n    pass",
        OK,
    ),
    Attack(
        "kills everybody (kill -1)",
        "try:\n    os.kill(-1, signal.SIGKILL)\nexcept OSError:\n    pass",
        OK,
    ),
    Attack("kills itself", "os.kill(os.getpid(), signal.SIGKILL)", FAULT, "killed by SIGKILL"),
    Attack("os._exit", "os._exit(7)", FAULT, "exit code 7"),
    Attack("segmentation fault", "ctypes.string_at(0)", FAULT, "killed by SIGSEGV"),
    Attack(
        "bottomless recursion",
        "sys.setrecursionlimit(1 << 30)\nclass Nest:\n    def __repr__(self):\n        return repr(self)\nrepr(Nest())",
        FAULT,
        "SIGSEGV",
        reason_from_3_12="RecursionError",
    ),
    Attack(
        "leaves a spinning child",
        "if os.fork() == 0:\n    os.closerange(0, 64)\n    while True:\n        pass",
        OK,
        weak=False,
    ),
    Attack(
        "huge output",
        "while True:\n    os.write(1, b'x' * 65536)",
        FAULT,
        "printed more than 1000000 bytes",
    ),
    Attack(
        "reads the environment",
        f"assert not any({SECRET!r} in text for text in [*os.environ, *os.environ.values()])\nfor pid in ('1', str(os.getppid())):\n    try:\n        assert {SECRET!r} not in open(f'/proc/{{pid}}/environ').read()\n    except OSError:\n        pass",
        OK,
    ),
    Attack(
        "reads files of others",
        "print(open(MARKED).read())",
        FAULT,
        "Error",
        head="MARKED = '{marked}'",
    ),
    Attack("reads system files", "print(open('/etc/passwd').read())", FAULT, "Error"),
    Attack(
        "lists other processes",
        "found = [int(p) for p in os.listdir('/proc') if p.isdigit()]\nassert len(found) == 2, found",
        OK,
        weak=False,
    ),
    Attack("writes outside", "open('/usr/planted', 'w')", FAULT, "Error"),
    Attack("writes into its own interpreter", "open(os.__file__, 'a')", FAULT, "Error"),
    Attack(
        "network",
        "import socket\nsocket.create_connection(('127.0.0.1', 80), timeout=1)",
        FAULT,
        "PermissionError",
    ),
    Attack(
        "new namespaces, mounts, ptrace",
        "libc = ctypes.CDLL(None)\nassert libc.unshare(0x10000000) == libc.ptrace(0, 0, 0, 0) == libc.mount(b'none', b'/', b'tmpfs', 0, None) == -1\ntry:\n    os.setuid(0)\n    sys.exit(1)\nexcept OSError:\n    pass",
        OK,
    ),
    Attack(
        "raises its own limits",
        "import resource\nfor kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):\n    try:\n        resource.setrlimit(kind, (1 << 40, 1 << 40))\n        sys.exit(1)\n    except ValueError:\n        pass",
        OK,
    ),
    Attack(
        "replaces the loop that calls it",
        "loop = sys.modules['__main__'].ScoringLoop\nloop.reply = lambda self, message: self._replies.write(b'nonsense')\n",
        OK,
    ),
    Attack(
        "forges an answer nobody asked for",
        FORGE.format(body='b\'{"id": 999999, "score": 1, "components": {}}\'', size="len(body)"),
        FAULT,
        "wrote into the pipe",
    ),
    Attack(
        "announces a gigantic answer",
        FORGE.format(body="b''", size="1 << 31"),
        FAULT,
        "announced a reply of 2147483648 bytes",
    ),
    Attack(
        "sends an answer nested too deeply",
        FORGE.format(body="b'[' * 200000", size="len(body)"),
        FAULT,
        "wrote into the pipe",
    ),
    Attack(
        "returns a dict without end",
        "class Endless(dict):\n    def items(self):\n        while True:\n            yield 'a', 'b'\nreturn Endless(score=1)",
        TIMEOUT,
        "no score after 1 s",
    ),
    Attack(
        "signals by a file's owner",
        "import fcntl, socket\nr, w = os.pipe()\na, b = socket.socketpair()\nfor end in (r, a.fileno()):\n    quietly(fcntl.fcntl, end, 10, 9)\n    quietly(fcntl.fcntl, end, 8, {victim})\n    quietly(fcntl.fcntl, end, 15, struct.pack('ii', 1, {victim}))\n    quietly(fcntl.fcntl, end, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)\nfor number in (0x8901, 0x8902):\n    quietly(fcntl.ioctl, a.fileno(), number, struct.pack('i', {victim}))\nos.write(w, b'x')\nb.send(b'x')\ntime.sleep(0.05)",
        OK,
        head=ORDINARY,
    ),
    Attack(
        "queued signals",
        f"info = {SIGINFO}\nqueue, of_thread = (129, 297) if {X86} else (138, 240)\nlibc.syscall(queue, {{victim}}, 9, info)\nlibc.syscall(of_thread, {{victim}}, {{victim}}, 9, info)\nlibc.syscall(424, libc.syscall(434, {{victim}}, 0), 9, None, 0)\nlibc.syscall(200 if {X86} else 130, {{victim}}, 9)\nquietly(os.kill, {{victim}}, 9)\ntime.sleep(0.05)",
        OK,
        head=ORDINARY,
    ),
    Attack(
        "changes what a file of others says of itself",
        "for call, *rest in ((os.chmod, 0o777), (os.chown, -1, os.getgid()), (os.utime, (1, 1)), (os.truncate, 0), (os.setxattr, 'user.x', b'x')):\n    quietly(call, '{marked}', *rest)\nlibc.syscall(452, -100, b'{marked}', 0o777, 0)",
        OK,
        head=ORDINARY,
    ),
    Attack(
        "datagrams to others",
        "import socket\nfor kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):\n    pair = quietly(socket.socketpair, socket.AF_UNIX, kind)\n    for name in ('{socket}', '\\0{socket}'):\n        if pair:\n            quietly(pair[0].sendto, b'x', name)\n            quietly(pair[0].sendmsg, [b'x'], [], 0, name)\n            quietly(pair[0].connect, name)\n            quietly(pair[0].send, b'x')",
        OK,
        head=ORDINARY,
    ),
    Attack(
        "slows others",
        "quietly(os.sched_setaffinity, {victim}, [0])\nquietly(os.setpriority, os.PRIO_PROCESS, {victim}, 19)\nquietly(os.setpriority, os.PRIO_USER, os.getuid(), 19)\nquietly(os.sched_setscheduler, {victim}, os.SCHED_IDLE, os.sched_param(0))\nlibc.syscall(251 if os.uname().machine == 'x86_64' else 30, 1, {victim}, 3 << 13)",
        OK,
        head=ORDINARY,
    ),
    Attack(
        "empty files without end",
        "for n in range(10_000):\n    os.close(os.open(os.environ['TMPDIR'] + f'/{n}', os.O_CREAT | os.O_WRONLY))\nsys.exit('made 10000 files')",
        FAULT,
        "No space left",
        private_tmp=True,
    ),
    Attack(
        "empty folders without end",
        "for n in range(10_000):\n    os.mkdir(os.environ['TMPDIR'] + f'/{n}')\nsys.exit('made 10000 folders')",
        FAULT,
        "No space left",
        private_tmp=True,
    ),
    Attack(
        "empty files in /dev/shm without end",
        "for n in range(10_000):\n    os.close(os.open(f'/dev/shm/{n}', os.O_CREAT | os.O_WRONLY))\nsys.exit('made 10000 files')",
        FAULT,
        "Error",
    ),
    Attack(
        "socket buffers without end",
        "import socket\nheld, size = [], 0\nwhile size < 64 << 20:\n    try:\n        pair = socket.socketpair()\n    except OSError:\n        break\n    held.append(pair)\n    for end in pair:\n        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):\n            quietly(end.setsockopt, socket.SOL_SOCKET, option, 1 << 30)\n        end.setblocking(False)\n        while (sent := quietly(end.send, bytes(1 << 16))):\n            size += sent\nassert size < 64 << 20, size",
        OK,
        head=ORDINARY,
    ),
    Attack(
        "pipe buffers without end",
        "import fcntl\nheld, size = [], 0\nwhile True:\n    try:\n        ends = os.pipe()\n    except OSError:\n        break\n    held.append(ends)\n    quietly(fcntl.fcntl, ends[1], 1031, 1 << 20)\n    os.set_blocking(ends[1], False)\n    while (sent := quietly(os.write, ends[1], bytes(1 << 16))):\n        size += sent\nassert size <= 32 << 16, size",
        OK,
        head=ORDINARY,
    ),
    Attack(
        "file locks without end",
        "import fcntl\nwith open(os.environ['TMPDIR'] + '/x', 'w') as file:\n    for n in range(10_000, 0, -1):\n        fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * n)\nsys.exit('took 10000 locks')",
        FAULT,
        "No locks available",
    ),
    Attack(
        "watches without end",
        "libc.inotify_init1(0) == -1 or sys.exit(1)\nlibc.inotify_init() == -1 or sys.exit(2)",
        OK,
        head=ORDINARY,
    ),
    Attack(
        "calls younger than the filter",
        "for number in range(470, 520):\n    assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 38, number",
        OK,
        head=ORDINARY,
    ),
    Attack(
        "a name that is no text",
        "return {'score': 1, '\\ud800': 2}",
        FAULT,
        "a component's name",
    ),
    Attack(
        "a name that is a path",
        "return {'score': 1, '../../x': 2}",
        FAULT,
        "a component's name",
    ),
    Attack(
        "a name without end",
        "return {'score': 1, 'x' * 900_000: 2}",
        FAULT,
        "a component's name",
    ),
    Attack(
        "forges an answer of 60,000 components",
        OWN_ANSWER.format(
            body='(\'{"id":%d,"score":1,"components":{%s}}\' % (number, \',\'.join(f\'"c{n}":1\' for n in range(60000)))).encode()'
        ),
        FAULT,
        "wrote into the pipe",
    ),
    Attack(
        "forges an answer that no column holds",
        OWN_ANSWER.format(body='b\'{"id":%d,"score":1e308,"components":{}}\' % number'),
        FAULT,
        "wrote into the pipe",
    ),
    Attack(
        "forges an answer with a name that is no text",
        OWN_ANSWER.format(body='b\'{"id":%d,"score":1,"components":{"\\\\ud800":1}}\' % number'),
        FAULT,
        "wrote into the pipe",
    ),
    Attack(
        "forges an answer with a score that is text",
        OWN_ANSWER.format(body='b\'{"id":%d,"score":"1","components":{}}\' % number'),
        FAULT,
        "wrote into the pipe",
    ),
    Attack("endless import", "", FAULT, "did not load within", head="while True: pass"),
    Attack(
        "exit at import",
        "",
        FAULT,
        "ended the scoring process while being loaded: exit code 3",
        head="os._exit(3)",
    ),
    Attack(
        "forged readiness at import",
        "",
        FAULT,
        "wrote into the",
        head="for fd in range(3, 20):\n    try: os.write(fd, struct.pack('>I', 4) + b'true')\n    except OSError: pass\nos._exit(0)",
    ),
]


def table() -> str:
    """The rows of the page: `python -m tests.adversarial.attacks` prints them."""
    lines = [
        "| the function | ends as | with the reason | without bubblewrap |",
        "|---|---|---|---|",
    ]
    for attack in ATTACKS:
        outcome = "refused at start" if not attack.body else f"`{attack.outcome}`"
        reason = (
            f"… {attack.reason} …"
            if attack.reason
            else "it has no effect: the score is the function's own"
        )
        if attack.reason_from_3_12:
            reason += f", from Python 3.12 on … {attack.reason_from_3_12} …"
        lines.append(
            f"| {attack.name} | {outcome} | {reason} | {'the same' if attack.weak else 'not tried'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

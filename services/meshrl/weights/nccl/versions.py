"""Which NCCL a process has: its version in words, and the files that it came from."""

from __future__ import annotations

import re


def dotted(code: int) -> str:
    """22907 is 2.29.7; before 2.9 the minor version had one digit: 2804 is 2.8.4."""
    major = code // 10000 or code // 1000
    rest = code - major * (10000 if code >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def loaded_nccl(maps: str) -> set[str]:
    """The files of libnccl among the lines of a /proc/<pid>/maps; its plugins (libnccl-net) are none."""
    paths = (line.split(maxsplit=5)[5:] for line in maps.splitlines())
    return {path[0] for path in paths if path and re.search(r"/libnccl\.so[.\d]*$", path[0])}

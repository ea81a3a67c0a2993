"""A shared library's file with fat binaries in it, as `nvcc` writes them, made without it."""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

GPU = Path(__file__).parents[3] / "benchmarks" / "gpu"
PTX, MACHINE_CODE = 1, 2
ENTRY_HEADER = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """Code for one architecture."""

    kind: int
    arch: int
    code: bytes

    def __bytes__(self) -> bytes:
        header = bytearray(ENTRY_HEADER)
        struct.pack_into("<HHIQ", header, 0, self.kind, 0x101, ENTRY_HEADER, len(self.code))
        struct.pack_into("<I", header, 28, self.arch)
        return bytes(header) + self.code


def fat_binary(*entries: Entry) -> bytes:
    """Its header, and the entries behind it."""
    payload = b"".join(map(bytes, entries))
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(payload)) + payload


def entries_of(data: bytes, start: int) -> list[Entry]:
    """Entries of the fat binary at `start`."""
    magic, _, header, payload = struct.unpack_from("<IHHQ", data, start)
    assert magic == 0xBA55ED50
    found, at, end = [], start + header, start + header + payload
    while at < end:
        kind, _, head, size = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        found.append(Entry(kind, arch, data[at + head : at + head + size]))
        at += head + size
    return found


def library(path: Path, sections: Mapping[str, Sequence[bytes]]) -> dict[str, list[int]]:
    """Write an ELF file with these sections; returns where each of their parts begins, aligned to 8 bytes."""
    contents = bytearray(64)
    names, heads = bytearray(b"\0"), [(0, 0, 0, 0, 0, 0)]
    starts: dict[str, list[int]] = {}
    for name, parts in sections.items():
        first = len(contents)
        starts[name] = []
        for part in parts:
            starts[name].append(len(contents))
            contents += part + bytes(-len(part) % 8)
        heads.append((len(names), 1, 0, 0, first, len(contents) - first))
        names += name.encode() + b"\0"
    heads.append((len(names), 3, 0, 0, len(contents), 0))
    names += b".shstrtab\0"
    heads[-1] = (*heads[-1][:5], len(names))
    contents += names + bytes(-len(names) % 8)
    struct.pack_into("<4sBBB", contents, 0, b"\x7fELF", 2, 1, 1)
    struct.pack_into("<Q", contents, 40, len(contents))
    struct.pack_into("<HHH", contents, 58, 64, len(heads), len(heads) - 1)
    for head in heads:
        contents += struct.pack("<IIQQQQ", *head) + bytes(24)
    path.write_bytes(contents)
    return starts


def script(name: str) -> ModuleType:
    """A script of benchmarks/gpu as a module."""
    specification = importlib.util.spec_from_file_location(f"gpu_{Path(name).stem}", GPU / name)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module

"""Remove the machine code of other GPUs from CUDA libraries, in place, so that they compress to a tenth.

    python benchmarks/gpu/prune_fatbin.py LIBRARY.so ... [--arch 90] [--list]

The section `.nv_fatbin` is a sequence of fat binaries, each a sequence of entries: machine code (ELF) or PTX for one
architecture. The entries of `--arch` move to the front of their fat binary, its size is set to theirs, and zeros
follow. No fat binary moves, so no symbol and no relocation of the library changes. A fat binary without an entry of
`--arch` keeps the smallest entry of another GPU: a kernel of it fails when it is launched, and not before. The
section `__nv_relfatbin`, which only a device linker reads, goes the same way. Prints the sizes of each library.
"""

from __future__ import annotations

import argparse
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAGIC = 0xBA55ED50
MACHINE_CODE = 2
LINKED, RELOCATABLE = ".nv_fatbin", "__nv_relfatbin"

# Offsets in the ELF header, and the layouts of a section header and of both headers of a fat binary.
SECTION_TABLE = 40
SECTION_COUNTS = 58
SECTION = struct.Struct("<IIQQQQ")
BINARY = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQ")
ENTRY_ARCH = 28


@dataclass(frozen=True, slots=True)
class Entry:
    """The code for one architecture in a fat binary; `start` and `size` in bytes, header included."""

    start: int
    size: int
    kind: int
    arch: int


@dataclass(slots=True)
class FatBinary:
    """The header's place in the file, and the entries behind it."""

    start: int
    relocatable: bool
    entries: list[Entry] = field(default_factory=list)

    def of_arch(self, arch: int) -> list[Entry]:
        """The machine code for `arch`; a device linker's is never needed."""
        if self.relocatable:
            return []
        return [entry for entry in self.entries if (entry.kind, entry.arch) == (MACHINE_CODE, arch)]


def sections(data: mmap.mmap) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size in bytes of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, SECTION_TABLE)
    stride, count, names = struct.unpack_from("<HHH", data, SECTION_COUNTS)
    headers = [SECTION.unpack_from(data, table + index * stride) for index in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, size in headers:
        start = strings + name
        yield data[start : data.find(b"\0", start)].decode(), offset, size


def fat_binaries(data: mmap.mmap) -> Iterator[FatBinary]:
    """All fat binaries of a library, in the order of the file."""
    for name, offset, size in sections(data):
        if name not in (LINKED, RELOCATABLE):
            continue
        position, end = offset, offset + size
        while position + BINARY.size <= end:
            magic, _, header, length = BINARY.unpack_from(data, position)
            if magic != MAGIC:
                position += 8
                continue
            binary = FatBinary(position, name == RELOCATABLE)
            inner, last = position + header, position + header + length
            while inner < last:
                kind, _, entry_header, payload = ENTRY.unpack_from(data, inner)
                (arch,) = struct.unpack_from("<I", data, inner + ENTRY_ARCH)
                binary.entries.append(Entry(inner, entry_header + payload, kind, arch))
                inner += entry_header + payload
            yield binary
            position = -(-last // 8) * 8


def prune(path: Path, arch: int, *, change: bool) -> str:
    """Prune one library, or only say what would stay. Returns a line with the sizes."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        binaries = list(fat_binaries(data))
        fillers = _fillers(data, binaries, arch)
        kept = [binary.of_arch(arch) for binary in binaries]
        if change:
            for binary, entries in zip(binaries, kept, strict=True):
                _rewrite(data, binary, entries, fillers[binary.relocatable])
    sizes = [sum(entry.size for entry in entries) for entries in kept]
    all_sizes = [sum(entry.size for entry in binary.entries) for binary in binaries]
    without = sum(
        not entries and not binary.relocatable
        for binary, entries in zip(binaries, kept, strict=True)
    )
    return (
        f"{path.name}: {sum(map(len, kept))} of {sum(len(binary.entries) for binary in binaries)} entries,"
        f" {sum(sizes) / 2**20:.1f} of {sum(all_sizes) / 2**20:.1f} MiB; {without} of {len(binaries)} fat binaries"
        f" have no machine code for {arch}"
    )


def _fillers(data: mmap.mmap, binaries: list[FatBinary], arch: int) -> dict[bool, bytes]:
    """The smallest entry for another GPU, by whether it is relocatable: a fat binary must not be empty."""
    found: dict[bool, bytes] = {}
    for relocatable in (False, True):
        others = [
            entry
            for binary in binaries
            if binary.relocatable == relocatable
            for entry in binary.entries
            if entry.kind == MACHINE_CODE and entry.arch != arch
        ]
        smallest = min(others, key=lambda entry: entry.size, default=None)
        found[relocatable] = (
            b"" if smallest is None else data[smallest.start : smallest.start + smallest.size]
        )
    return found


def _rewrite(data: mmap.mmap, binary: FatBinary, keep: list[Entry], filler: bytes) -> None:
    """Move what stays to the front, fill with zeros, and set the size in the header.

    A fat binary that is empty, or shorter than the filler (PTX of a few bytes), stays as it is.
    """
    if not binary.entries:
        return
    start, last = binary.entries[0].start, binary.entries[-1]
    room = last.start + last.size - start
    kept = b"".join(data[entry.start : entry.start + entry.size] for entry in keep) or filler
    if len(kept) > room:
        return
    data[start : start + room] = kept + bytes(room - len(kept))
    struct.pack_into("<Q", data, binary.start + 8, len(kept))


def main() -> None:
    """Prune each library and print its sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", nargs="+", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="compute capability times ten")
    parser.add_argument("--list", action="store_true", help="change nothing")
    given = parser.parse_args()
    for path in given.library:
        print(prune(path, given.arch, change=not given.list))


if __name__ == "__main__":
    main()

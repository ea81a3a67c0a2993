"""`benchmarks/gpu/prune_fatbin.py`: code of other GPUs goes, and nothing else changes its place."""

from __future__ import annotations

from pathlib import Path

from .fat_library import MACHINE_CODE, PTX, Entry, entries_of, fat_binary, library, script

PRUNE = script("prune_fatbin.py").prune

OWN = Entry(MACHINE_CODE, 90, b"code for sm_90" * 9)
OWN_TOO = Entry(MACHINE_CODE, 90, b"code for sm_90a" * 3)
SMALL = Entry(MACHINE_CODE, 80, b"small")
LARGE = Entry(MACHINE_CODE, 100, b"large" * 100)
TEXT = Entry(PTX, 90, b"text" * 20)
SHORT_TEXT = Entry(PTX, 90, b"t")
OTHER = b"not a fat binary" * 20


def prune(path: Path, arch: int = 90) -> str:
    said: str = PRUNE(path, arch, change=True)
    return said


def test_entries_of_other_gpus_go_and_all_else_stays_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    starts = library(
        path,
        {
            ".text": [OTHER],
            ".nv_fatbin": [
                fat_binary(SMALL, OWN, LARGE, OWN_TOO, TEXT),
                fat_binary(OWN),
                fat_binary(LARGE, TEXT),
            ],
            ".data": [OTHER],
        },
    )
    before = path.read_bytes()
    said = prune(path)
    after = path.read_bytes()
    assert "3 of 8 entries" in said and "1 of 3 fat binaries have no machine code for 90" in said
    assert len(after) == len(before)
    first, second, third = starts[".nv_fatbin"]
    assert entries_of(after, first) == [OWN, OWN_TOO]
    assert entries_of(after, second) == [OWN]
    # Not empty, for it must stay a fat binary: its kernels fail when they are launched.
    assert entries_of(after, third) == [SMALL]
    # What followed the entries that stay is zeros, up to the next fat binary.
    kept = first + 16 + len(bytes(OWN)) + len(bytes(OWN_TOO))
    assert not any(after[kept:second]) and any(before[kept:second])
    (end,) = starts[".data"]
    assert (after[:first], after[end:]) == (before[:first], before[end:])


def test_pruning_twice_is_pruning_once(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    library(path, {".nv_fatbin": [fat_binary(LARGE, OWN, SMALL), fat_binary(LARGE, SMALL)]})
    prune(path)
    once = path.read_bytes()
    prune(path)
    assert path.read_bytes() == once


def test_a_list_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    library(path, {".nv_fatbin": [fat_binary(SMALL, OWN)]})
    before = path.read_bytes()
    assert "1 of 2 entries" in PRUNE(path, 90, change=False)
    assert path.read_bytes() == before


def test_what_only_a_device_linker_reads_goes(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    starts = library(
        path,
        {
            ".nv_fatbin": [fat_binary(OWN, LARGE)],
            "__nv_relfatbin": [fat_binary(OWN, LARGE), fat_binary(SMALL, OWN)],
        },
    )
    prune(path)
    after = path.read_bytes()
    assert [entries_of(after, start) for start in starts["__nv_relfatbin"]] == [[SMALL], [SMALL]]
    assert entries_of(after, starts[".nv_fatbin"][0]) == [OWN]


def test_another_architecture_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    (start,) = library(path, {".nv_fatbin": [fat_binary(SMALL, OWN, LARGE)]})[".nv_fatbin"]
    prune(path, 100)
    assert entries_of(path.read_bytes(), start) == [LARGE]


def test_a_library_without_fat_binaries_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    library(path, {".text": [OTHER], ".nv_fatbin": []})
    before = path.read_bytes()
    assert "0 of 0 entries" in prune(path)
    assert path.read_bytes() == before


def test_a_fat_binary_of_ptx_that_has_no_room_for_another_entry_is_left_whole(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lib.so"
    sections = {".nv_fatbin": [fat_binary(SHORT_TEXT), fat_binary(), fat_binary(LARGE, OWN)]}
    starts = library(path, sections)[".nv_fatbin"]
    before = path.read_bytes()
    prune(path)
    after = path.read_bytes()
    assert len(after) == len(before)
    assert [entries_of(after, start) for start in starts] == [[SHORT_TEXT], [], [OWN]]

"""The carrier `nccl` on its stub library: real processes and sockets, faults wherever NCCL may have them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.config.weights import NcclConfig, WeightsConfig
from meshrl.contract.errors import ConfigError, InfraError, UnavailableError
from meshrl.contract.types import Uint8, Version
from meshrl.weights.carrier import Link, RunPaths
from meshrl.weights.carriers.nccl import Carrier, NcclChannel, connect
from meshrl.weights.nccl import messages
from meshrl.weights.nccl.library import dotted, loaded_nccl
from meshrl.weights.nccl.process import Facts, NcclProcess, NcclProcesses
from meshrl.weights.transport import load_carrier
from tests.doubles import nccl
from tests.doubles.weights import StubSource

from ..waiting import gone, runs, until
from .weights_fleet import opened

AMPLE_S = 60.0
"""A deadline that is not what ends a test."""


def settings(**stub: Any) -> dict[str, Any]:
    """`weights.nccl` for processes whose NCCL is the stub, set up like this."""
    return {**nccl.settings(**stub), "spare": False}


class Ends:
    """A trainer's and a replica's carrier, with a library each."""

    def __init__(self, trainer: dict[str, Any], replica: dict[str, Any], base_s: float) -> None:
        paths = RunPaths(directory=Path())
        self.carriers = [
            Carrier(WeightsConfig.model_validate({"nccl": each, "base_s": base_s}), paths)
            for each in (trainer, replica)
        ]
        self.endpoint = ""
        self.generation = 0
        self.channels: list[NcclChannel] = []

    def pair(self) -> tuple[NcclChannel, NcclChannel]:
        """Both ends of a channel of the next generation."""
        self.generation += 1
        about = {"run": "run", "epoch": 1, "generation": self.generation, "endpoint": self.endpoint}
        first, second = (
            carrier.channel(Link(**about, rank=rank)) for rank, carrier in enumerate(self.carriers)
        )
        self.channels += [first, second]
        return first, second

    async def opened(self, deadline_s: float = AMPLE_S) -> tuple[NcclChannel, NcclChannel]:
        first, second = self.pair()
        await asyncio.gather(first.open(deadline_s), second.open(deadline_s))
        return first, second

    @property
    def pids(self) -> list[int]:
        processes = [channel._process for channel in self.channels]
        return [process.pid for process in processes if process and process.pid]


@pytest.fixture
async def make() -> AsyncIterator[Any]:
    """Makes `Ends`; afterwards no process may be left."""
    made: list[Ends] = []

    async def ends(
        trainer: dict[str, Any] | None = None,
        replica: dict[str, Any] | None = None,
        base_s: float = AMPLE_S,
    ) -> Ends:
        both = Ends(settings(**trainer or {}), settings(**replica or {}), base_s)
        made.append(both)
        both.endpoint = await both.carriers[0].listen()
        return both

    yield ends
    for each in made:
        pids = each.pids
        for channel in each.channels:
            await channel.close()
        for carrier in each.carriers:
            await carrier.close()
        assert not any(map(runs, pids))


async def carry(channels: tuple[NcclChannel, NcclChannel], source: StubSource, index: int) -> Uint8:
    into = np.empty(source.manifest.bucket_bytes[index], dtype=np.uint8)
    await asyncio.gather(
        channels[0].send(source.manifest, index, source.bucket(index)),
        channels[1].receive(source.manifest, index, into),
    )
    return into


async def failures(
    channels: tuple[NcclChannel, NcclChannel], source: StubSource, index: int
) -> list[str]:
    """Errors of both ends for a bucket that fails at both."""
    manifest = source.manifest
    into = np.empty(manifest.bucket_bytes[index], dtype=np.uint8)
    said = await asyncio.gather(
        channels[0].send(manifest, index, source.bucket(index)),
        channels[1].receive(manifest, index, into),
        return_exceptions=True,
    )
    assert all(isinstance(each, UnavailableError) for each in said), said
    return [str(each) for each in said]


async def test_versions_with_buckets_of_any_size_arrive_byte_by_byte(make: Any) -> None:
    channels = await (await make()).opened()
    for step, nbytes in enumerate((1 << 16, 5 << 20, 1 << 10)):  # memory grows, and is kept
        source = StubSource("run", Version(1, step), bucket_bytes=nbytes)
        for index in range(4):
            assert np.array_equal(await carry(channels, source, index), source.bucket(index))


async def test_a_bucket_is_sent_again_in_the_same_channel(make: Any) -> None:
    channels = await (await make()).opened()
    source = StubSource("run", Version(1, 0))
    for index in (0, 1, 0):
        assert np.array_equal(await carry(channels, source, index), source.bucket(index))


@pytest.mark.parametrize("ended", [False, True], ids=["just killed", "gone"])
async def test_a_generation_after_a_failed_one_has_processes_and_a_communicator_of_its_own(
    make: Any, ended: bool
) -> None:
    ends = await make()
    source = StubSource("run", Version(1, 0))
    channels = await ends.opened()
    before = list(ends.pids)
    os.kill(before[1], signal.SIGKILL)
    if ended:
        await gone(before[1])
    # The sender may be through before the receiver's process is missed: only the receiver is sure to fail.
    sending = asyncio.ensure_future(channels[0].send(source.manifest, 0, source.bucket(0)))
    with pytest.raises(UnavailableError, match="SIGKILL"):
        await channels[1].receive(source.manifest, 0, source.bucket(0).copy())
    await asyncio.gather(sending, return_exceptions=True)
    again = await ends.opened()
    assert not set(before) & set(ends.pids[2:])
    assert np.array_equal(await carry(again, source, 0), source.bucket(0))


async def test_different_versions_of_nccl_are_one_line_at_both_ends(make: Any) -> None:
    first, second = (await make({"version": "2.30.7"}, {"version": "2.29.7"})).pair()
    said = await asyncio.gather(first.open(AMPLE_S), second.open(AMPLE_S), return_exceptions=True)
    for error in said:
        assert isinstance(error, ConfigError)
        assert "the trainer has NCCL 2.30.7, the replica 2.29.7" in str(error)
        assert "\n" not in str(error)


async def test_a_library_that_another_version_joins_says_so_too() -> None:
    root, other = (
        NcclProcess(NcclConfig.model_validate(settings(version=version)))
        for version in ("2.30.7", "2.29.7")
    )
    try:
        await asyncio.gather(root.start(), other.start())
        unique_id = await root.unique_id()
        said = await asyncio.gather(
            root.join(2, unique_id, 0, AMPLE_S),
            other.join(2, unique_id, 1, AMPLE_S),
            return_exceptions=True,
        )
        assert ["Mismatched NCCL version" in str(each) for each in said] == [True, True]
    finally:
        await asyncio.gather(root.kill_and_wait(), other.kill_and_wait())


@pytest.mark.parametrize(("at", "end"), [("join", 0), ("warm_up", 1)])
async def test_a_process_that_hangs_while_it_joins_is_killed_at_the_deadline(
    make: Any, at: str, end: int
) -> None:
    hangs = {"faults": [{"at": at, "do": "hang"}], "deaf": True}
    ends = await make(*([hangs, {"deaf": True}] if end == 0 else [{"deaf": True}, hangs]))
    first, second = ends.pair()
    said = await asyncio.gather(first.open(1.5), second.open(1.5), return_exceptions=True)
    assert all(isinstance(each, UnavailableError) for each in said), said
    for channel in (first, second):
        assert channel._process is not None and not channel._process.alive


async def test_a_replica_that_does_not_come_is_waited_for_until_the_deadline(make: Any) -> None:
    first, _ = (await make()).pair()
    with pytest.raises(UnavailableError, match=r"run/e1/g1, rank 0: .*joining: no progress"):
        await first.open(0.5)


@pytest.mark.parametrize("end", [0, 1])
async def test_a_broadcast_that_hangs_ends_at_the_deadline_of_its_bucket_at_both_ends(
    make: Any, end: int
) -> None:
    hangs, waits = {"faults": [{"at": "middle", "do": "hang"}], "deaf": True}, {"deaf": True}
    ends = await make(*([hangs, waits] if end == 0 else [waits, hangs]), base_s=1.0)
    channels = await ends.opened()
    # So much that rank 0 is not through before the other.
    source = StubSource("run", Version(1, 0), bucket_bytes=16 << 20)
    said = await failures(channels, source, 0)
    # Said by the process itself, or on a busy machine by its parent, which kills it a little later.
    assert any("did not finish in" in each or "no progress" in each for each in said), said
    for channel in channels:  # until it is gone it may write there: nobody else gets that memory
        assert channel._process is not None and channel._process._memory is not None


async def test_an_error_that_nccl_reports_is_known_long_before_the_deadline(make: Any) -> None:
    channels = await (await make({"faults": [{"at": "bucket", "nth": 2, "do": "error"}]})).opened()
    source = StubSource("run", Version(1, 0))
    assert np.array_equal(await carry(channels, source, 0), source.bucket(0))
    said = await failures(channels, source, 1)
    assert "NCCL_ERROR_SYSTEM_ERROR: on request" in said[0]
    assert "NCCL_ERROR_REMOTE_ERROR" in said[1]


async def test_giving_a_channel_up_wakes_whoever_waits_in_it(make: Any) -> None:
    first, second = await (await make()).opened()
    source = StubSource("run", Version(1, 0), bucket_bytes=16 << 20)  # rank 0 waits for the other
    sending = asyncio.create_task(first.send(source.manifest, 0, source.bucket(0)))
    await asyncio.sleep(
        0.1
    )  # into the broadcast, on most days; before it, giving up must do the same
    first.abort()
    first.abort()
    with pytest.raises(UnavailableError):
        await sending
    with pytest.raises(UnavailableError, match="not open"):
        await first.send(source.manifest, 1, source.bucket(1))
    await second.close()


async def test_a_channel_that_is_given_up_while_it_opens_leaves_no_process(make: Any) -> None:
    first, _ = (await make()).pair()
    opening = asyncio.create_task(first.open(AMPLE_S))
    await asyncio.sleep(0)
    first.abort()
    with pytest.raises(UnavailableError, match="aborted"):
        await opening
    assert not first._process or not first._process.alive


async def test_a_process_in_waiting_is_used_and_a_dead_one_is_not() -> None:
    processes = NcclProcesses(NcclConfig.model_validate({**settings(), "spare": True}))
    try:
        processes.prepare()
        processes.prepare()
        waiting = await processes.take()
        await waiting.facts()
        processes.put_back(waiting)
        assert await processes.take() is waiting
        processes.put_back(waiting)
        await waiting.kill_and_wait()
        other = await processes.take()
        assert other is not waiting
        assert (await other.facts()).library == "tests.doubles.nccl"
    finally:
        await processes.close()


async def test_who_gives_up_waiting_for_a_process_spoils_it_for_nobody() -> None:
    processes = NcclProcesses(NcclConfig.model_validate({**settings(), "spare": True}))
    try:
        processes.prepare()
        impatient = asyncio.create_task(processes.take())
        await asyncio.sleep(0)
        impatient.cancel()
        assert (await (await processes.take()).facts()).library == "tests.doubles.nccl"
        assert impatient.cancelled()
    finally:
        await processes.close()


async def test_the_id_of_a_process_that_died_leads_nowhere() -> None:
    config = NcclConfig.model_validate(settings())
    minter, other = NcclProcess(config), NcclProcess(config)
    try:
        await asyncio.gather(minter.start(), other.start())
        unique_id = await minter.unique_id()
        assert len(unique_id) == 128
        await minter.kill_and_wait()
        with pytest.raises(UnavailableError, match="rank 0 has ended"):
            await other.join(2, unique_id, 1, AMPLE_S)
    finally:
        await other.kill_and_wait()


async def test_connections_without_the_token_or_an_expected_channel_are_refused(make: Any) -> None:
    ends = await make()
    first, second = ends.pair()
    facts = Facts(library="stub", version="2.30.7")
    address, _, token = ends.endpoint.partition("/")
    with pytest.raises(UnavailableError, match="closed the connection"):
        await connect(f"{address}/guess", "run/e1/g1", facts)
    with pytest.raises(UnavailableError, match="closed the connection"):
        await connect(f"{address}/{token}", "run/e1/g7", facts)
    host, _, port = address.partition(":")
    for junk in (b"GET / HTTP/1.1\r\n\r\n", messages.pack({"token": None}), b"\x02\0\0\0[]"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(junk)
        assert await reader.read() == b""
        writer.close()
    await asyncio.gather(first.open(AMPLE_S), second.open(AMPLE_S))


async def test_a_frame_is_read_whole_or_refused() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(messages.pack({"do": "join", "rank": 1}) + b"\xff\xff\xff\xff")
    assert await messages.read(reader) == {"do": "join", "rank": 1}
    with pytest.raises(InfraError, match="4294967295 bytes"):
        await messages.read(reader)
    reader.feed_eof()
    assert await messages.read(reader) is None


def test_a_nccl_that_does_not_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    config = WeightsConfig.model_validate({"carrier": "nccl", "nccl": nccl.settings()})
    with pytest.raises(ConfigError, match="NCCL_COMM_BLOCKING=0 is set"):
        load_carrier(config, RunPaths(directory=Path()))
    own = {"library": "tests.doubles.nccl", "env": {"NCCL_COMM_BLOCKING": "1"}}
    Carrier(WeightsConfig.model_validate({"nccl": own}), RunPaths(directory=Path()))


@pytest.mark.skipif(bool(importlib.util.find_spec("cupy")), reason="cupy is installed here")
def test_without_cupy_the_carrier_says_what_to_install_in_one_line() -> None:
    with pytest.raises(ConfigError) as failure:
        load_carrier(WeightsConfig(carrier="nccl"), RunPaths(directory=Path()))
    assert "pip install 'meshrl[nccl]'" in str(failure.value)
    assert "\n" not in str(failure.value)


async def test_a_process_without_its_library_says_so_and_ends() -> None:
    process = NcclProcess(NcclConfig(library="cupi", spare=False))
    await process.start()
    with pytest.raises(ConfigError, match=r"'cupi'; did you mean 'cupy'\? \(known: cupy,"):
        await process.facts()
    await process.kill_and_wait()


def test_versions_are_written_as_people_write_them() -> None:
    assert [dotted(code) for code in (22907, 23007, 23203, 2804)] == [
        "2.29.7",
        "2.30.7",
        "2.32.3",
        "2.8.4",
    ]


def test_two_files_of_nccl_in_one_process_are_seen() -> None:
    maps = """\
7f00-7f01 r-xp 00000000 08:01 11 /a/nvidia/nccl/lib/libnccl.so.2
7f01-7f02 r--p 00000000 08:01 11 /a/nvidia/nccl/lib/libnccl.so.2
7f02-7f03 r-xp 00000000 08:01 12 /usr/lib/x86 64/libnccl.so.2.30.7
7f03-7f04 r-xp 00000000 08:01 13 /opt/libnccl-net.so
7f04-7f05 rw-p 00000000 00:00 0
"""
    assert loaded_nccl(maps) == {
        "/a/nvidia/nccl/lib/libnccl.so.2",
        "/usr/lib/x86 64/libnccl.so.2.30.7",
    }


async def test_a_replica_with_another_nccl_is_named_and_the_others_are_one_communicator(
    tmp_path: Path,
) -> None:
    async with opened("nccl", tmp_path) as fleet:
        engines = await fleet.joined("one", "two")
        nccl = settings(version="2.28.9")
        fleet.config = WeightsConfig.model_validate(fleet.config.model_dump() | {"nccl": nccl})
        odd = fleet.join("odd")
        await until(lambda: fleet.state_of("odd") is not None)
        source = fleet.source(0)
        await fleet.carry(source)
        assert fleet.published == [source.manifest.version]
        assert [engine.hashes for engine in engines] == [source.manifest.bucket_hashes] * 2
        assert odd.hashes == ()
        with pytest.raises(ConfigError, match=r"trainer has NCCL 2\.30\.7, the replica 2\.28\.9"):
            await fleet.controllers.pop("odd")

"""The port of models that callers train: numbers, answers, turns, bounds; and the files behind it."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.codec import pack_training, unpack_training_request
from meshrl.contract.errors import (
    BusyError,
    CapacityError,
    ConflictError,
    CorruptError,
    InfraError,
    NotFoundError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.types import (
    AdamStep,
    CreateModel,
    LoadWeights,
    Pass,
    Refused,
    SaveWeights,
    TrainingExample,
    TrainingRequest,
    TrainingResult,
    TrainingVerb,
    UnloadModel,
)
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.hosted.audit import audit, copy
from meshrl.trainer.hosted.host import HostedTraining, HostingLimits
from meshrl.trainer.hosted.records import EntryKind, Journal
from meshrl.trainer.hosted.storage import FACTS, Disk, facts_of, folder_of
from meshrl.trainer.hosted.workbench import PolicyBench
from meshrl.trainer.ranks.world import World
from tests.doubles.hosted import StandInBench, StandInModel

from ...waiting import until
from .test_hosted_passes import examples

CREATE = CreateModel(base_model="m", lora_rank=4)
STEP = AdamStep(learning_rate=0.1)


def learn(number: float = 0, **more: float) -> Pass:
    return Pass(examples=[], loss="ppo", loss_settings={"number": number, **more})


def ask(number: int, verb: TrainingVerb, model: str = "m") -> TrainingRequest:
    return TrainingRequest(model=model, number=number, verb=verb)


async def done(
    host: HostedTraining, *verbs: TrainingVerb, model: str = "m", first: int = 0
) -> list[TrainingResult]:
    """Answers to requests that are submitted one after the other."""
    for number, verb in enumerate(verbs, first):
        await host.submit(ask(number, verb, model))
    numbers = range(first, first + len(verbs))
    return [await host.result(model, number, wait_s=10) for number in numbers]


@pytest.fixture
def bench() -> StandInBench:
    return StandInBench()


@pytest.fixture
async def host(tmp_path: Path, bench: StandInBench) -> AsyncIterator[HostedTraining]:
    host = HostedTraining(tmp_path, bench)
    await host.open()
    yield host
    await host.close()


async def test_a_repeated_request_has_the_first_answer(
    host: HostedTraining, bench: StandInBench
) -> None:
    first = await done(host, CREATE, learn(1), STEP)
    again = await done(host, CREATE, learn(1), STEP)
    assert list(map(pack_training, again)) == list(map(pack_training, first))
    assert len(bench.done) == 2
    with pytest.raises(ConflictError, match="another request 1"):
        await host.submit(ask(1, learn(2)))
    together = [ask(3, learn(3)) for _ in range(5)]
    await asyncio.gather(*map(host.submit, together))
    await host.result("m", 3, wait_s=10)
    assert len(bench.done) == 3


async def test_a_request_that_waits_for_one_that_never_comes_is_told(
    tmp_path: Path, bench: StandInBench
) -> None:
    host = HostedTraining(tmp_path, bench, limits=HostingLimits(missing_s=0))
    await host.open()
    await done(host, CREATE)
    await host.submit(ask(2, STEP))
    with pytest.raises(ConflictError, match="waits for request 1, which never came"):
        await host.result("m", 2, wait_s=0)
    await host.submit(ask(1, learn(1)))
    assert (await host.result("m", 2, wait_s=10)).error is None
    await host.close()


async def test_an_early_request_waits_for_those_before_it(host: HostedTraining) -> None:
    await host.submit(ask(0, CREATE))
    await host.submit(ask(2, STEP))
    with pytest.raises(WaitTimeoutError, match="request 2 of model m is not done; it is at 1"):
        await host.result("m", 2, wait_s=0.05)
    with pytest.raises(WaitTimeoutError):
        await host.result("m", 2, wait_s=0)
    waiting = asyncio.create_task(host.result("m", 2, wait_s=10))
    await host.submit(ask(1, learn()))
    assert (await waiting).error is None


async def test_what_is_not_there_is_said(host: HostedTraining) -> None:
    with pytest.raises(NotFoundError, match="no model m; want its creation"):
        await host.submit(ask(1, STEP))
    with pytest.raises(NotFoundError, match="no model m; want its creation"):
        await host.submit(ask(0, STEP))
    with pytest.raises(NotFoundError, match="no model m"):
        await host.result("m", 0, wait_s=0)
    await done(host, CREATE)
    with pytest.raises(NotFoundError, match="request 7 of model m was not submitted"):
        await host.result("m", 7, wait_s=0)
    with pytest.raises(UserError, match="from 0 on"):
        await host.submit(ask(-1, STEP))


@pytest.mark.parametrize(
    ("verb", "wanted"),
    [
        (learn(wrong=1), "wrong it is"),
        (Refused(error="no pictures here"), "no pictures here"),
        (CREATE, "request 0 creates the model"),
        (SaveWeights(name="../../etc"), "name '../../etc': want 1 to 128 letters"),
        (SaveWeights(name=""), "name '': want"),
        (SaveWeights(name="\ud83d"), "this save weights cannot be sent"),
        (SaveWeights(name=".hidden"), "name '.hidden'"),
        (LoadWeights(path="/etc/passwd"), "want tinker://MODEL/weights/NAME"),
        (LoadWeights(path="tinker://../weights/a"), "model '..'"),
        (LoadWeights(path="tinker://m/weights/.."), "name '..'"),
        (LoadWeights(path="tinker://m/weights/a/b"), "want tinker://"),
        (LoadWeights(path="tinker://m/other/a"), "want tinker://"),
    ],
)
async def test_a_refused_request_uses_up_its_number(
    host: HostedTraining, bench: StandInBench, tmp_path: Path, verb: TrainingVerb, wanted: str
) -> None:
    await done(host, CREATE)
    for _ in range(2):
        with pytest.raises(UserError) as refused:
            await host.submit(ask(1, verb))
        assert wanted in str(refused.value)
    answer = await host.result("m", 1, wait_s=10)
    assert answer.error == str(refused.value) and answer.user_error
    with pytest.raises(ConflictError):
        await host.submit(ask(1, learn()))
    assert (await done(host, learn(), STEP, first=2))[-1].error is None
    await host.close()
    other = HostedTraining(tmp_path, bench)
    await other.open()
    with pytest.raises(UserError) as refused:
        await other.submit(ask(1, verb))
    assert wanted in str(refused.value)
    await other.close()


async def test_a_refused_creation_makes_no_model(host: HostedTraining, tmp_path: Path) -> None:
    for name, verb in (
        ("a/b", CREATE),
        ("..", CREATE),
        ("m", replace(CREATE, load_from="nowhere")),
    ):
        with pytest.raises(UserError):
            await host.submit(ask(0, verb, name))
    assert not list((tmp_path / "models").iterdir())
    answers = await done(host, replace(CREATE, lora_rank=13), learn())
    assert answers[0].error == "rank 13 brings bad luck"
    assert answers[1].error == "model m does not exist: rank 13 brings bad luck"


async def test_an_error_of_ours_changes_nothing(host: HostedTraining) -> None:
    answers = await done(host, CREATE, learn(1), learn(2, fails=1), STEP, model="a")
    assert answers[2].error == "ZeroDivisionError: it fails" and not answers[2].user_error
    assert answers[3].metrics == (await done(host, CREATE, learn(1), STEP, model="b"))[2].metrics


async def test_a_step_that_breaks_stops_its_model_until_a_restart(
    host: HostedTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(StandInModel, "step", lambda *_: 1 / 0)
        await host.submit(ask(0, CREATE))
        await host.submit(ask(1, learn()))
        await host.submit(ask(2, STEP))
        with pytest.raises(InfraError, match="cannot continue before a restart: division by zero"):
            await host.result("m", 2, wait_s=10)
        with pytest.raises(InfraError, match="before a restart"):
            await host.submit(ask(3, STEP))
        assert (await done(host, CREATE, model="other"))[0].error is None
    await host.close()
    again = HostedTraining(tmp_path, StandInBench())
    await again.open()
    assert (await again.result("m", 2, wait_s=10)).error is None
    await again.close()


async def test_checkpoints_are_saved_loaded_and_never_replaced_unasked(
    host: HostedTraining, tmp_path: Path
) -> None:
    first = await done(
        host, CREATE, learn(1), STEP, SaveWeights(name="a"), learn(2), STEP, SaveWeights(name="a")
    )
    assert first[3].path == "tinker://m/weights/a"
    assert (
        first[6].error == "there is tinker://m/weights/a already; want another name, or overwrite"
    )
    path = "tinker://m/weights/a"
    facts = facts_of(folder_of(tmp_path, path))
    assert facts == {
        "model": "m", "number": 3, "form": {"lora_rank": 4}, "base": "base", "base_model": "m",
    }  # fmt: skip
    other = replace(CREATE, lora_rank=None, load_from=path, with_optimizer=True)
    copied = await done(host, other, learn(2), STEP, model="copy")
    assert copied[2].metrics == first[5].metrics
    loaded = await done(host, LoadWeights(path=path, with_optimizer=True), learn(2), STEP, first=7)
    assert loaded[2].metrics == first[5].metrics
    plain = await done(host, LoadWeights(path=path), learn(2), STEP, first=10)
    assert plain[2].metrics != first[5].metrics
    sampler = (await done(host, SaveWeights(name="a", for_sampler=True), first=13))[0].path
    assert sampler == "tinker://m/sampler_weights/a"
    answers = await done(
        host,
        LoadWeights(path=sampler),
        LoadWeights(path="tinker://m/weights/b"),
        LoadWeights(path=path),
        first=14,
    )
    assert answers[0].error == f"{sampler} is for samplers; want tinker://MODEL/weights/NAME"
    assert answers[1].error == "there is no checkpoint tinker://m/weights/b"
    answers = await done(host, replace(CREATE, lora_rank=2), LoadWeights(path=path), model="two")
    assert "of another form" in str(answers[1].error)
    (folder_of(tmp_path, path) / "state.json").write_text("{}")
    answers = await done(host, LoadWeights(path=path), first=17)
    assert "state.json differs" in str(answers[0].error) and not answers[0].user_error


async def test_an_unloaded_model_is_gone_and_its_answers_are_not(
    tmp_path: Path, bench: StandInBench
) -> None:
    limits = HostingLimits(models=2, unloaded=1, snapshot_steps=1)
    host = HostedTraining(tmp_path, bench, limits=limits)
    await host.open()
    await done(host, CREATE, learn(), STEP, UnloadModel(), model="a")
    answer = (await done(host, learn(), model="a", first=4))[0]
    assert answer.error == "model a does not exist: it was unloaded"
    assert bench.made == 0 and not list((tmp_path / "models" / "a").glob("snapshot*"))
    await done(host, CREATE, model="b")
    await done(host, CREATE, UnloadModel(), model="c")
    await done(host, CREATE, model="d")
    with pytest.raises(BusyError, match="there are 2 models"):
        await host.submit(ask(0, CREATE, "e"))
    assert (await host.result("c", 1, wait_s=1)).error is None
    with pytest.raises(NotFoundError):
        await host.result("a", 3, wait_s=1)
    await host.close()
    host = HostedTraining(tmp_path, bench, limits=limits)
    await host.open()
    assert (await done(host, learn(), model="c", first=2))[0].error is not None
    with pytest.raises(BusyError, match="there are 2 models"):
        await host.submit(ask(0, CREATE, "e"))
    await host.close()


async def test_models_that_find_no_memory_take_turns_there(tmp_path: Path) -> None:
    """As many as the limit says, and as the bench has room for; each continues as if it were alone."""
    bench, alone = CrowdedBench(most=3), StandInBench()
    names = [f"m{number}" for number in range(5)]
    limits = HostingLimits(in_memory=2, snapshot_steps=3)
    host = HostedTraining(tmp_path / "crowd", bench, limits=limits)
    whole = HostedTraining(tmp_path / "alone", alone)
    await host.open()
    await whole.open()
    for number in range(12):
        for place, name in enumerate(names):
            verb = CREATE if not number else (STEP, learn(place))[number % 2]
            found = await done(host, verb, model=name, first=number)
            wanted = await done(whole, verb, model=name, first=number)
            assert list(map(pack_training, found)) == list(map(pack_training, wanted))
    assert bench.seen == 2
    await host.close()
    host = HostedTraining(tmp_path / "crowd", bench, limits=HostingLimits())
    await host.open()
    for name in names:
        found = await done(host, learn(7), STEP, model=name, first=12)
        wanted = await done(whole, learn(7), STEP, model=name, first=12)
        assert list(map(pack_training, found)) == list(map(pack_training, wanted))
    assert bench.seen == 3
    await host.close()
    await whole.close()


class CrowdedBench(StandInBench):
    """A bench with room for `most` models."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.seen = 0

    def create(self, verb: CreateModel) -> StandInModel:
        if self.made >= self.most:
            raise BusyError("no room")
        made = super().create(verb)
        self.seen = max(self.seen, self.made)
        return made


async def test_models_that_were_never_made_take_no_place(
    tmp_path: Path, bench: StandInBench
) -> None:
    """A creation that failed, and a folder whose process was killed before it had a request."""
    (tmp_path / "models" / "empty").mkdir(parents=True)
    limits = HostingLimits(models=1)
    bad = replace(CREATE, lora_rank=13)
    for name in ("a", "b"):
        host = HostedTraining(tmp_path, bench, limits=limits)
        await host.open()
        assert not (tmp_path / "models" / "empty").exists()
        assert (await done(host, bad, learn(), model=name))[1].error is not None
        assert (await done(host, bad, learn(), model="a"))[1].error is not None
        await host.close()
    host = HostedTraining(tmp_path, bench, limits=limits)
    await host.open()
    assert (await done(host, CREATE, model="c"))[0].error is None
    assert "bad luck" in str((await done(host, STEP, model="b", first=2))[0].error)
    with pytest.raises(BusyError):
        await host.submit(ask(0, CREATE, "d"))
    await host.close()


class PacedBench(StandInBench):
    """Passes that take `cost` seconds of a clock of their own, and wait at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.gate = threading.Semaphore(0)

    def create(self, verb: CreateModel) -> StandInModel:
        bench = self

        class Paced(StandInModel):
            def forward_backward(self, request: Pass) -> TrainingResult:
                bench.gate.acquire(timeout=10)
                bench.now += request.loss_settings["cost"]
                return super().forward_backward(request)

        return Paced(self, verb)


async def test_a_flood_does_not_starve_others(tmp_path: Path) -> None:
    bench = PacedBench()
    host = HostedTraining(tmp_path, bench, clock=lambda: bench.now)
    await host.open()
    for name in ("flood", "slow", "late"):
        await done(host, replace(CREATE, base_model=name), model=name)
    for number in range(1, 41):
        await host.submit(ask(number, learn(number, cost=1), "flood"))
    for number in range(1, 6):
        await host.submit(ask(number, learn(number, cost=4), "slow"))
    bench.gate.release(10)
    await until(lambda: len(bench.done) == 10)
    for number in range(1, 4):
        await host.submit(ask(number, learn(number, cost=1), "late"))
    bench.gate.release(1000)
    await host.result("flood", 40, wait_s=10)
    order = [name for name, _ in bench.done]
    assert order.index("slow") <= 3
    between = [i for i, name in enumerate(order) if name == "slow"]
    assert all(later - earlier <= 9 for earlier, later in pairwise(between))
    assert order.index("late") < 20
    assert order[-20:] == ["flood"] * 20
    await host.close()


async def test_bounds_of_what_waits(tmp_path: Path) -> None:
    bench = PacedBench()
    limits = HostingLimits(waiting=4, waiting_bytes=1000, request_bytes=2000)
    host = HostedTraining(tmp_path, bench, limits=limits)
    await host.open()
    await done(host, CREATE)
    for number in (2, 3, 4):
        await host.submit(ask(number, learn(cost=1)))
    with pytest.raises(BusyError, match="4 requests may wait, and it is at 1"):
        await host.submit(ask(5, learn(cost=1)))
    fat = replace(
        learn(), examples=[TrainingExample(tokens=np.zeros(800, np.int32), loss_inputs={})]
    )
    with pytest.raises(UserError, match="want at most 2000"):
        await host.submit(ask(1, fat))
    lean = [TrainingExample(tokens=np.zeros(200, np.int32), loss_inputs={})]
    with pytest.raises(BusyError, match="requests of 1000 bytes may wait"):
        await host.submit(ask(5, replace(learn(cost=1), examples=lean)))
    await host.submit(ask(5, learn(cost=2)))
    bench.gate.release(1000)
    await host.result("m", 5, wait_s=10)
    await host.close()


class FullDisk(Disk):
    """Takes nothing while it is full."""

    full = False
    appends = 0

    def append(self, path: Path, at: int, data: bytes) -> None:
        self.appends += 1
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(path, at, data)


async def test_a_full_disk_refuses_requests_and_holds_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.trainer.hosted.host.PAUSE_S", 0.01)
    disk, bench = FullDisk(), PacedBench()
    host = HostedTraining(tmp_path, bench, disk=disk)
    await host.open()
    await done(host, CREATE)
    await host.submit(ask(1, learn(cost=1)))
    disk.full = True
    with pytest.raises(CapacityError, match="No space left"):
        await host.submit(ask(2, STEP))
    bench.gate.release(1000)
    with pytest.raises(WaitTimeoutError):
        await host.result("m", 1, wait_s=0.1)
    disk.full = False
    assert (await host.result("m", 1, wait_s=10)).error is None
    assert (await done(host, STEP, first=2))[0].error is None
    await host.close()


async def test_a_disk_without_room_for_a_snapshot_stops_nobody(tmp_path: Path) -> None:
    class Crowded(Disk):
        full = True

        def place(self, *given: Any, **more: Any) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().place(*given, **more)

    disk = Crowded()
    host = HostedTraining(
        tmp_path, StandInBench(), disk=disk, limits=HostingLimits(snapshot_steps=1)
    )
    await host.open()
    answers = await done(host, CREATE, learn(), STEP, SaveWeights(name="a"), learn(), STEP)
    assert answers[3].error == "OSError: [Errno 28] No space left on device"
    assert answers[5].error is None
    disk.full = False
    await done(host, learn(), STEP, first=6)
    await until(lambda: list((tmp_path / "models" / "m").glob("snapshot-*")))
    await host.close()


async def test_requests_that_come_together_are_synced_together(tmp_path: Path) -> None:
    disk, bench = FullDisk(), PacedBench()
    host = HostedTraining(tmp_path, bench, disk=disk)
    await host.open()
    await done(host, CREATE)
    before = disk.appends
    requests = [ask(number, learn(number, cost=1)) for number in range(1, 101)]
    await asyncio.gather(*map(host.submit, requests))
    assert disk.appends - before <= 2
    bench.gate.release(1000)
    await host.result("m", 100, wait_s=10)
    await host.close()


async def test_a_caller_that_goes_leaves_its_request(
    tmp_path: Path, host: HostedTraining, bench: StandInBench
) -> None:
    await done(host, CREATE)
    leaving = asyncio.create_task(host.submit(ask(1, learn())))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (await host.result("m", 1, wait_s=10)).error is None


async def test_old_answers_go_when_there_are_many_bytes(
    tmp_path: Path, bench: StandInBench
) -> None:
    limits = HostingLimits(snapshot_steps=1, answers_bytes=2000)
    host = HostedTraining(tmp_path, bench, limits=limits)
    await host.open()
    for number, verb in enumerate([CREATE, *[learn(), STEP] * 20]):
        await done(host, verb, first=number)
    for opened in range(2):
        with pytest.raises(NotFoundError, match="request 1 of model m has an answer no longer"):
            await host.result("m", 1, wait_s=0)
        await host.submit(ask(1, learn()))  # it was done
        assert (await host.result("m", 40, wait_s=0)).error is None
        assert len(list((tmp_path / "models" / "m").iterdir())) < 15
        if not opened:
            await host.close()
            host = HostedTraining(tmp_path, bench, limits=limits)
            await host.open()
    await host.close()


async def test_one_process_at_a_time_has_a_folder(host: HostedTraining, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is in use by another process"):
        await HostedTraining(tmp_path, StandInBench()).open()


async def test_whoever_waits_hears_of_the_end(tmp_path: Path, host: HostedTraining) -> None:
    await host.submit(ask(0, CREATE))
    await host.submit(ask(2, STEP))
    waiting = asyncio.create_task(host.result("m", 2, wait_s=60))
    await asyncio.sleep(0.01)
    await host.close()
    with pytest.raises(UnavailableError, match="has stopped; ask again"):
        await waiting
    with pytest.raises(UnavailableError):
        await host.submit(ask(1, STEP))


def test_requests_and_answers_are_the_same_after_a_journal() -> None:
    request = ask(3, Pass(examples=examples("gspo"), loss="gspo", loss_settings={"a": 1.0}))
    data = pack_training(request)
    back = unpack_training_request(data)
    assert pack_training(back) == data
    assert isinstance(back.verb, Pass) and back.verb.loss == "gspo"
    for ours, theirs in zip(request.verb.examples, back.verb.examples, strict=True):  # type: ignore[union-attr]
        assert (
            np.array_equal(ours.tokens, theirs.tokens) and ours.tokens.dtype == theirs.tokens.dtype
        )
        for name, values in ours.loss_inputs.items():
            assert np.array_equal(values, theirs.loss_inputs[name])
    turned = dict(reversed(request.verb.examples[0].loss_inputs.items()))  # type: ignore[union-attr]
    same = replace(request.verb.examples[0], loss_inputs=turned)  # type: ignore[union-attr]
    again = replace(request.verb, examples=[same, *request.verb.examples[1:]])  # type: ignore[union-attr]
    assert pack_training(replace(request, verb=again)) == data
    for verb in (CREATE, STEP, SaveWeights(name="a"), LoadWeights(path="p"), UnloadModel()):
        assert unpack_training_request(pack_training(ask(1, verb))) == ask(1, verb)


async def journal_of(folder: Path, count: int) -> Path:
    journal = Journal(folder, Disk())
    for number in range(count):
        await journal.append((EntryKind.REQUEST, number, b"request" * number))
    return folder / "journal-000000000000"


async def test_a_torn_end_is_cut_off(tmp_path: Path) -> None:
    file = await journal_of(tmp_path, 2)
    kept = file.stat().st_size
    await Journal(tmp_path, Disk()).append((EntryKind.REQUEST, 2, b"last" * 9))
    data = file.read_bytes()
    torn = [data[:size] for size in range(kept, len(data))]
    torn += [data[:at] + bytes(8) + data[at + 8 :] for at in range(kept, len(data) - 8)]
    for each in torn:
        file.write_bytes(each)
        journal = Journal(tmp_path, Disk())
        assert journal.numbers(EntryKind.REQUEST) == [0, 1] and file.stat().st_size == kept
        await journal.append((EntryKind.REQUEST, 2, b"again"))
        assert Journal(tmp_path, Disk()).read(EntryKind.REQUEST, 2) == b"again"


async def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    file = await journal_of(tmp_path, 3)
    before = file.stat().st_size
    await Journal(tmp_path, Disk()).append((EntryKind.REQUEST, 3, b""))
    data = file.read_bytes()
    for at in range(before):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptError) as damaged:
            Journal(tmp_path, Disk())
        assert "is damaged at byte" in str(damaged.value) and "\n" not in str(damaged.value)


async def test_a_torn_end_before_another_file_is_damage(tmp_path: Path) -> None:
    """A file is begun when all before it is durable."""
    file = await journal_of(tmp_path, 3)
    journal = Journal(tmp_path, Disk())
    journal.rotate(3)
    await journal.append((EntryKind.REQUEST, 3, b"next"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="is damaged at byte"):
        Journal(tmp_path, Disk())


async def test_a_damaged_snapshot_stops_its_model_alone(
    tmp_path: Path, host: HostedTraining
) -> None:
    for model in ("a", "b"):
        await done(host, CREATE, *[learn(), STEP] * 16, model=model)
    await host.close()
    [snapshot] = (tmp_path / "models" / "a").glob("snapshot-*")
    (snapshot / FACTS).write_text("{}")
    again = HostedTraining(tmp_path, StandInBench())
    await again.open()
    await again.submit(ask(33, STEP, "a"))
    with pytest.raises(InfraError, match="unreadable"):
        await again.result("a", 33, wait_s=10)
    assert (await done(again, learn(), STEP, model="b", first=33))[1].error is None
    await again.close()


@pytest.mark.parametrize("rank", [None, 4])
async def test_a_restarted_model_goes_on_bit_for_bit(
    tmp_path: Path, tiny_path: Path, world: World, rank: int | None
) -> None:
    """The folder as a kill leaves it, at every request: what is computed again has the same bits."""
    model = replace(CREATE, lora_rank=rank)
    verbs: list[TrainingVerb] = [model]
    for seed in range(5):
        verbs += [
            Pass(examples=examples("ppo", seed), loss="ppo"),
            Pass(examples=examples("cross_entropy", seed), loss="cross_entropy"),
            AdamStep(learning_rate=1e-2),
        ]
    verbs += [Pass(examples=examples("ppo"), loss="ppo", backward=False)]
    limits = HostingLimits(snapshot_steps=2)

    def opened(folder: Path) -> HostedTraining:
        bench = PolicyBench(ModelConfig(path=tiny_path), world, tokens_at_once=64)
        return HostedTraining(folder, bench, limits=limits)

    host = opened(tmp_path / "whole")
    await host.open()
    wanted = []
    for number, verb in enumerate(verbs):
        wanted += [pack_training(each) for each in await done(host, verb, first=number)]
        shutil.copytree(tmp_path / "whole", tmp_path / str(number))
    await host.close()
    for number in range(0, len(verbs), 3):
        host = opened(tmp_path / str(number))
        await host.open()
        assert [pack_training(each) for each in await done(host, *verbs)] == wanted
        await host.close()


async def test_a_copy_goes_on_as_the_models_that_it_is_of(
    tmp_path: Path, bench: StandInBench
) -> None:
    verbs = [CREATE, learn(1), STEP, SaveWeights(name="a"), learn(2)]
    there = HostedTraining(tmp_path / "there", bench, limits=HostingLimits(snapshot_steps=1))
    await there.open()
    answers = await done(there, *verbs)
    with pytest.raises(UserError, match="in use by another process; stop it first"):
        audit(there.folder)
    await there.close()
    copy(there.folder, tmp_path / "copy")
    with pytest.raises(ConflictError, match="never overwritten"):
        copy(there.folder, tmp_path / "copy")
    found = audit(tmp_path / "copy")
    assert (found.problems, found.models, found.requests, found.checkpoints) == ([], 1, 5, 1)
    last = []
    for folder in (there.folder, tmp_path / "copy"):
        host = HostedTraining(folder, StandInBench())
        await host.open()
        again = await done(host, *verbs)
        assert list(map(pack_training, again)) == list(map(pack_training, answers))
        last.append(pack_training((await done(host, STEP, first=5))[0]))
        await host.close()
    assert last[0] == last[1]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda at: shutil.rmtree(*(at / "models/m").glob("snapshot-*")), "snapshot before"),
        (lambda at: next(at.glob("models/m/snapshot-*/state.json")).write_text("{}"), "differs"),
        (lambda at: next(at.glob("checkpoints/m/weights/a/state.json")).unlink(), "state.json"),
    ],
)
async def test_what_would_keep_models_from_going_on_is_found(
    tmp_path: Path, bench: StandInBench, harm: Any, said: str
) -> None:
    limits = HostingLimits(snapshot_steps=2, answers_bytes=0)
    host = HostedTraining(tmp_path, bench, limits=limits)
    await host.open()
    await done(host, CREATE, *[learn(1), STEP] * 2)
    await until(lambda: host._turns["m"].model.first == 5)
    await done(host, *[learn(1), STEP] * 2, learn(3), SaveWeights(name="a"), first=5)
    await host.close()
    assert audit(tmp_path).problems == []
    harm(tmp_path)
    (problem,) = audit(tmp_path).problems
    assert said in problem


async def test_an_answer_whose_request_is_lost_is_found(host: HostedTraining) -> None:
    answers = await done(host, CREATE, learn(1))
    await host.close()
    journal = Journal(host.folder / "models" / "m", Disk())
    await journal.append((EntryKind.ANSWER, 2, pack_training(answers[1])))
    assert audit(host.folder).problems == ["model m: request 2 has an answer, and is gone"]

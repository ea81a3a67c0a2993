from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshrl.contract.errors import NotFoundError, UserError
from meshrl.contract.rows import parts_column, rollout_write, trajectory
from meshrl.contract.stage_worker import Failure, StageResult
from meshrl.contract.types import (
    PARTS,
    REFERENCE_COLUMNS,
    REFERENCE_TOP,
    ROLLOUT_STAGE,
    Columns,
    Float32,
    Int32,
    LeasedRow,
    Media,
    Outcome,
    RowPart,
    RowWrite,
    RunSpec,
    StageSpec,
    Task,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
)
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.policy import build_policy, load_hf, open_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World
from meshrl.trainer.reference.model import ReferenceModel, Seen
from meshrl.trainer.reference.stage import ReferenceStage, SharedPrefixGroups
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore
from tests.doubles.vision_rows import logprobs_alone
from tests.doubles.vision_rows import rows as vision_rows

from ...pictures import make_model, picture
from ...waiting import until
from . import rank_work, tiny
from .ranks import Ranks
from .test_vision import load_theirs
from .test_vision import row as vision_row


@pytest.fixture
async def reference(tiny_path: Path) -> AsyncIterator[ReferenceModel]:
    model = ReferenceModel(tiny_path, device="cpu", max_tokens=100)
    yield model
    model.close()


async def logprobs(
    model: ReferenceModel, rows: Sequence[Int32], *, temperature: float = 1.0
) -> list[Float32]:
    """The column `ref_logprobs` of each row."""
    return [row["ref_logprobs"] for row in await model.judged(rows, temperature=temperature)]


async def test_logprobs_are_those_of_transformers(
    reference: ReferenceModel, tiny_path: Path
) -> None:
    rows = tiny.rows(9)
    found = await logprobs(reference, rows, temperature=0.7)
    hf = AutoModelForCausalLM.from_pretrained(tiny_path)
    for row, mine in zip(rows, found, strict=True):
        expected = rank_work.exact_logprobs(hf, row, 0.7)
        assert mine.dtype == np.float32
        assert mine[0] == 0
        np.testing.assert_allclose(mine[1:], expected, rtol=1e-5, atol=1e-5)


def test_ranks_that_share_the_weights_answer_as_one_process(
    tiny_path: Path, tmp_path: Path, ranks: Ranks
) -> None:
    ranks.run("reference", tiny_path, output=tmp_path / "output", ranks=2)


async def test_a_deterministic_reference_answers_a_row_alike_in_any_company(
    tiny_path: Path,
) -> None:
    rows = tiny.rows(9)
    model = ReferenceModel(tiny_path, device="cpu", deterministic=True)
    together = await logprobs(model, rows)
    alone = [(await logprobs(model, [row]))[0] for row in rows]
    model.close()
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))


async def test_a_token_outside_the_vocabulary_is_named(reference: ReferenceModel) -> None:
    rows = [np.array([1, 2], np.int32), np.array([1, tiny.VOCABULARY], np.int32)]
    with pytest.raises(UserError, match=rf"row 1: token ids 1\.\.{tiny.VOCABULARY}"):
        await logprobs(reference, rows)


async def test_no_rows_give_no_logprobs(reference: ReferenceModel) -> None:
    assert list(await logprobs(reference, [])) == []


async def test_the_likeliest_tokens_are_those_of_transformers(
    reference: ReferenceModel, tiny_path: Path
) -> None:
    rows = tiny.rows(5)
    found = await reference.judged(rows, temperature=0.7, top=4)
    for row, plain, mine in zip(rows, await logprobs(reference, rows), found, strict=True):
        assert mine["ref_logprobs"].shape == plain.shape
        assert mine["ref_top_ids"].dtype == np.int32
        assert mine["ref_top_ids"].shape == mine["ref_top_logprobs"].shape == (len(row), 4)
        hf = AutoModelForCausalLM.from_pretrained(tiny_path)
        with torch.no_grad():
            logits = hf(torch.from_numpy(row.astype(np.int64))[None]).logits[0, :-1]
        likeliest = (logits / 0.7).log_softmax(-1).topk(4)
        np.testing.assert_array_equal(mine["ref_top_ids"][1:], likeliest.indices)
        np.testing.assert_allclose(
            mine["ref_top_logprobs"][1:], likeliest.values, rtol=1e-5, atol=1e-5
        )


async def test_more_than_the_vocabulary_is_all_of_it(reference: ReferenceModel) -> None:
    (found,) = await reference.judged(tiny.rows(1), top=tiny.VOCABULARY + 5)
    assert found["ref_top_ids"].shape[1] == tiny.VOCABULARY
    np.testing.assert_allclose(np.exp(found["ref_top_logprobs"][1:]).sum(-1), 1, rtol=1e-5)


async def staged(
    reference: ReferenceModel,
    tokens: Int32,
    prompt: int,
    *,
    top: int,
    media: tuple[Media, ...] = (),
) -> Trajectory:
    """A row of the queue, once the reference's stage has written its columns."""
    writes = (*REFERENCE_COLUMNS, *REFERENCE_TOP[: 2 * bool(top)])
    teaches = StageSpec(name="reference", reads=("tokens",), writes=writes)
    queue = await TransferQueue.open(MemoryStore())
    await queue.open_run(
        RunSpec(
            run="run",
            group_size=1,
            batch_groups=1,
            max_staleness=0.0,
            stages=(ROLLOUT_STAGE, teaches),
        )
    )
    task = Task(run="run", task_id="t", prompt_ids=tokens[:prompt], media=media)
    await queue.admit("run", [task], cursor="end", wait_s=5)
    version = Version((await queue.acquire("run", "trainer")).epoch, 0)
    await queue.publish("run", version)
    asked = {"worker": "w", "limit": 1, "version": version, "wait_s": 5}
    (leased,) = (await queue.lease(["run"], "rollout", **asked)).rows  # type: ignore[arg-type]
    sampled = np.ones(len(tokens), dtype=np.uint8)
    sampled[:prompt] = 0
    row = Trajectory(
        uid=leased.uid,
        tokens=tokens,
        loss_mask=sampled,
        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
        spans=(VersionSpan(version=version, start=prompt, end=len(tokens)),),
    )
    written = rollout_write(row, Outcome.OK, "stop", version)
    await queue.write_rows("run", "rollout", {leased.uid: leased.token}, [written])
    stage = ReferenceStage(
        queue,
        ["run"],
        partial(reference.judged, top=top),
        **{"worker": "r", "pictures": reference.reads_pictures},  # type: ignore[arg-type]
    )
    working = asyncio.create_task(stage.run())
    await until(lambda: stage.stats.written)
    stage.drain()
    await working
    (columns,) = await queue.fetch_rows("run", [leased.uid], [*ROLLOUT_STAGE.writes, *writes])
    await queue.close()
    return trajectory(leased.uid, columns)


async def test_a_stage_writes_what_the_teacher_thinks_likeliest_into_the_queue(
    reference: ReferenceModel,
) -> None:
    tokens = tiny.rows(1)[0]
    found = await staged(reference, tokens, 2, top=3)
    (wanted,) = await reference.judged([tokens], top=3)
    assert found.ref_top_ids is not None and found.ref_top_logprobs is not None
    assert found.ref_top_ids.shape == (len(tokens), 3)
    np.testing.assert_array_equal(found.ref_top_ids, wanted["ref_top_ids"])
    np.testing.assert_allclose(found.ref_top_logprobs, wanted["ref_top_logprobs"], rtol=1e-5)


async def test_branches_of_a_row_see_nothing_of_each_other(reference: ReferenceModel) -> None:
    one, two, three = tiny.rows(3)
    parts = parts_column((RowPart(start=0, anchors=()), RowPart(start=len(one), anchors=())))
    task = Task(run="run", task_id="t", prompt_ids=one[:2], group_size=2)
    both = {"tokens": np.concatenate([one, two]), PARTS: parts}
    rows = [
        LeasedRow(uid=Uid("run", "t", n, 0), token=n, task=task, columns=columns, delivery=1)
        for n, columns in enumerate((both, {"tokens": three}))
    ]
    judged = partial(reference.judged, top=3)
    stage = ReferenceStage(Gone(rows[0].uid), ["run"], judged, worker="r")  # type: ignore[arg-type]
    first, second = [r.columns for r in await stage._handle(rows) if isinstance(r, RowWrite)]
    alone = await reference.judged([one, two, three], top=3)
    for name in ("ref_logprobs", *REFERENCE_TOP):
        wanted = np.concatenate([alone[0][name], alone[1][name]])
        np.testing.assert_allclose(first[name], wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(second[name], alone[2][name], rtol=1e-5, atol=1e-5)


async def test_a_reference_reads_the_pictures_of_rows(tmp_path: Path) -> None:
    make_model(tmp_path)
    shown, other = picture(1, 96, 64), picture(2, 96, 64)
    rows = [vision_row(tmp_path, media, 4, n) for n, media in enumerate([[shown], [shown, other]])]
    tokens, seen = [row.tokens for row in rows], [Seen(row.loss_mask, row.media) for row in rows]
    reader = VisionReader(tmp_path, load_hf(tmp_path))
    theirs = load_theirs(tmp_path)
    for deterministic in (False, True):
        reference = ReferenceModel(tmp_path, device="cpu", deterministic=deterministic)
        found = await reference.judged(tokens, seen)
        for row, columns in zip(rows, found, strict=True):
            response = columns["ref_logprobs"][row.prompt_length :]
            expected = logprobs_alone(theirs, row, reader).detach()
            np.testing.assert_allclose(response, expected, rtol=1e-4, atol=1e-5)
        alike = [seen[0], Seen(rows[0].loss_mask, (other,))]
        _, wrong = await reference.judged([tokens[0]] * 2, alike)
        assert np.abs(wrong["ref_logprobs"] - found[0]["ref_logprobs"]).max() > 1e-3
        row = await staged(reference, tokens[1], rows[1].prompt_length, media=seen[1].media, top=0)
        assert row.ref_logprobs is not None
        np.testing.assert_allclose(row.ref_logprobs, found[1]["ref_logprobs"], atol=1e-5)
        with pytest.raises(UserError, match="row 0: picture 2 wants 6 places"):
            await reference.judged(tokens[:1], [Seen(rows[0].loss_mask, (shown, other))])
        reference.close()
    reference = ReferenceModel(tmp_path, device="cpu", max_tokens=len(tokens[0]))
    with patch.object(reference._policy, "top", wraps=reference._policy.top) as packs:
        await reference.judged([tokens[0]] * 2, alike)
    assert packs.call_count == 2  # equal tokens beside other pictures are not laid once
    reference.close()


class Gone:
    """A queue that one row has left."""

    def __init__(self, gone: Uid) -> None:
        self._gone = gone

    async def fetch_rows(self, run: str, uids: list[Uid], columns: object) -> list[Columns]:
        if self._gone in uids:
            raise NotFoundError(f"no row {self._gone}")
        return [{"loss_mask": np.ones(3, np.uint8)} for _ in uids]


async def test_a_row_that_left_while_its_pictures_were_asked_for_fails_alone() -> None:
    async def judged(rows: Sequence[Int32], seen: object, *, temperature: float) -> list[Columns]:
        return [{"ref_logprobs": np.zeros(len(row), np.float32)} for row in rows]

    task = Task(run="run", task_id="t", prompt_ids=np.arange(2, dtype=np.int32), group_size=3)
    tokens = {"tokens": np.arange(3, dtype=np.int32)}
    rows = [
        LeasedRow(uid=Uid("run", "t", n, 0), token=n, task=task, columns=tokens, delivery=1)
        for n in range(3)
    ]
    queue = Gone(rows[1].uid)
    stage = ReferenceStage(queue, ["run"], judged, worker="r", pictures=True)  # type: ignore[arg-type]
    results = {result.uid: type(result) for result in await stage._handle(rows)}
    assert results == {rows[0].uid: RowWrite, rows[1].uid: Failure, rows[2].uid: RowWrite}


async def test_a_reference_of_text_refuses_pictures(reference: ReferenceModel) -> None:
    with pytest.raises(UserError, match="rows have pictures, and the reference reads text only"):
        await reference.judged(tiny.rows(1), [Seen(np.zeros(1), (picture(0),))])


async def test_the_kl_term_of_rows_with_pictures_is_that_of_the_references_logprobs(
    tmp_path: Path, world: World
) -> None:
    make_model(tmp_path)
    rows = vision_rows(tmp_path)
    reference = ReferenceModel(tmp_path, device="cpu")
    seen = [Seen(row.loss_mask, row.media) for row in rows]
    found = await reference.judged([row.tokens for row in rows], seen)
    reference.close()
    policy = build_policy(open_hf(tmp_path), world, ModelConfig(path=tmp_path))
    learner = rank_work.make_of(
        policy,
        world,
        reader=VisionReader(tmp_path, policy.hf),
        use_kl_loss=True,
        optim={"lr": 1e-12},
    )
    for off, wanted in ((0.0, 0.0), (0.5, np.exp(0.5) - 0.5 - 1)):  # k3 of a difference of 0.5
        given = [
            replace(row, ref_logprobs=columns["ref_logprobs"] + np.float32(off))
            for row, columns in zip(rows, found, strict=True)
        ]
        metrics = rank_work.learn(learner, given)
        assert metrics["actor/kl_loss"] == pytest.approx(wanted, abs=1e-4)


GROUP = 4


def leased(task: str, *indices: int) -> list[LeasedRow]:
    prompt = np.arange(3, dtype=np.int32)
    made = Task(run="run", task_id=task, prompt_ids=prompt, group_size=GROUP)
    return [
        LeasedRow(uid=Uid("run", task, index, 0), token=1, task=made, columns={}, delivery=1)
        for index in indices
    ]


class Bench:
    """Work that remembers what it was given, one piece after the other, and waits at its gate."""

    def __init__(self, *, max_wait_s: float = 3600.0, most_waiting: int = 512) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()
        self.pieces: list[list[str]] = []
        self.groups = SharedPrefixGroups(
            self._work, max_wait_s=max_wait_s, most_waiting=most_waiting
        )

    async def _work(self, given: Sequence[LeasedRow]) -> Sequence[StageResult]:
        self.pieces.append(sorted(f"{row.uid.task}{row.uid.index}" for row in given))
        self.begun.set()
        await self.gate.wait()
        if any(row.uid.task == "bad" for row in given):
            raise RuntimeError("not these")
        return [RowWrite(uid=row.uid, columns={}) for row in reversed(given)]

    def bring(self, *args: object) -> asyncio.Task[Sequence[StageResult]]:
        return asyncio.create_task(self.groups.results(leased(*args)))  # type: ignore[arg-type]


def indices(results: Sequence[StageResult]) -> list[int]:
    return [result.uid.index for result in results]


async def test_rows_wait_for_their_group_and_for_no_other() -> None:
    bench = Bench()
    first, other, second = bench.bring("a", 0, 2), bench.bring("b", 0), bench.bring("a", 1, 3)
    assert indices(await first) == [0, 2]
    assert indices(await second) == [1, 3]
    assert bench.pieces == [["a0", "a1", "a2", "a3"]]
    other.cancel()


async def test_the_last_row_of_a_group_waits_for_nobody() -> None:
    bench = Bench(max_wait_s=0.0)
    assert indices(await bench.bring("a", 0, 1, 2)) == [0, 1, 2]
    bench.groups.max_wait_s = 3600.0
    assert indices(await bench.bring("a", 3)) == [3]
    assert bench.pieces == [["a0", "a1", "a2"], ["a3"]]


async def test_groups_that_are_due_while_others_are_worked_on_share_the_next_piece() -> None:
    bench = Bench()
    bench.gate.clear()
    calls = [bench.bring("a", *range(GROUP))]
    await bench.begun.wait()
    calls += [bench.bring(task, *range(GROUP)) for task in "bc"]
    await asyncio.sleep(0)
    bench.gate.set()
    await asyncio.gather(*calls)
    assert [len(piece) for piece in bench.pieces] == [GROUP, 2 * GROUP]


async def test_the_oldest_waits_no_longer_where_many_do() -> None:
    bench = Bench(most_waiting=2)
    oldest, newer = bench.bring("a", 0), bench.bring("b", 0, 1)
    assert indices(await oldest) == [0]
    assert not newer.done()
    newer.cancel()


async def test_who_fails_or_is_cancelled_leaves_the_others_their_work() -> None:
    bench = Bench()
    bench.gate.clear()
    cancelled = bench.bring("a", *range(GROUP))
    await bench.begun.wait()
    bad, good = bench.bring("bad", *range(GROUP)), bench.bring("c", *range(GROUP))
    await asyncio.sleep(0)
    cancelled.cancel()
    bench.gate.set()
    with pytest.raises(RuntimeError, match="not these"):
        await bad
    assert indices(await good) == list(range(GROUP))

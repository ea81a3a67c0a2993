"""Roles do only their own work, by every method that the descriptors have, with arguments made up from its fields.

So a method that is added is attacked here without a line of its own; only `KINDS` must say what it is for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from meshrl.contract import codec
from meshrl.contract.types import (
    REFERENCE_STAGE,
    REWARD_STAGE,
    ROLLOUT_STAGE,
    StageSpec,
    Uid,
    Version,
)
from meshrl.rpc import credentials
from meshrl.rpc.credentials import MeshRole, ensure_credentials, role_of, role_of_stage
from meshrl.rpc.identity import METHODS
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueAdminServicer, QueueServicer
from meshrl.testing.contract.queue_actors import rollout_of, spec, tasks, tokens_of
from meshrl.transferqueue.admin import QueueAdmin
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ...waiting import until
from .test_identity import methods, token_of

FEEDER, TRAINER, OPERATOR = MeshRole.FEEDER, MeshRole.TRAINER, MeshRole.OPERATOR
WORKERS = {MeshRole.ROLLOUT, MeshRole.REWARD, MeshRole.REFERENCE, MeshRole.STAGE}
BELOW_TRAINER = set(MeshRole) - {TRAINER, OPERATOR}
MINE = StageSpec(name="mine", reads=("tokens",), writes=("mine",))
STAGES = (ROLLOUT_STAGE, REWARD_STAGE, REFERENCE_STAGE, MINE)
HIGH = 1_000_000

LOOKS, WORKS, FEEDS, TRAINS, OPERATES, SUBMITS, TUNES = (
    "looks",
    "works",
    "feeds",
    "trains",
    "operates",
    "submits",
    "tunes",
)
MAY: Final = {
    LOOKS: set(MeshRole) - {MeshRole.AGENT, MeshRole.TUNER},
    WORKS: WORKERS | {OPERATOR},
    FEEDS: {FEEDER, TRAINER, OPERATOR},
    TRAINS: {TRAINER, OPERATOR},
    OPERATES: {OPERATOR},
    SUBMITS: {MeshRole.SUBMITTER, OPERATOR},
    TUNES: {MeshRole.TUNER, OPERATOR},
}
"""At most, by what a method is for."""
KINDS: Final = {
    "Queue": {
        LOOKS: "GetRunState Fetch GetLedger ListDeadLetters WhyWaiting",
        WORKS: "Lease Renew Attend Write Append Fail Release",
        FEEDS: "OpenRun Admit CloseFeed",
        TRAINS: "Acquire Redo Take Filter Settle Publish Commit Rewind",
        OPERATES: "Replay",
    },
    "QueueAdmin": {LOOKS: "ListRuns", OPERATES: "Backup Verify RemoveRun"},
    "Rollout": {LOOKS: "GetStats"},
    "Reward": {LOOKS: "Score GetInfo"},
    "RewardRegistry": {
        LOOKS: "ListRewards GetReward DiffRewards TryReward CompareRewards",
        SUBMITS: "SubmitReward",
        OPERATES: "RollBackReward RetireReward",
    },
    "Trainer": {LOOKS: "GetStatus Watch"},
    "Training": {TUNES: "Submit Result"},
    "Weights": {LOOKS: "Fleet", WORKS: "Join", OPERATES: "Drain"},
    "WeightPatches": {WORKS: "Fetch"},
}


def kinds() -> dict[str, str]:
    """Kind of each method, by full name."""
    return {
        f"/meshrl.v1.{service}/{name}": kind
        for service, of_kind in KINDS.items()
        for kind, names in of_kind.items()
        for name in names.split()
    }


QUEUES = sorted(name for name in methods() if name.split("/")[1].endswith(("Queue", "QueueAdmin")))
"""Every method that a queue serves."""


def test_it_is_known_what_every_method_is_for_and_nobody_else_may_call_it() -> None:
    assert set(kinds()) == set(methods())
    for name, kind in kinds().items():
        assert METHODS[name] <= MAY[kind], name
        assert OPERATOR in METHODS[name]


def test_what_a_reader_may_call_only_looks() -> None:
    assert {kind for name, kind in kinds().items() if MeshRole.READER in METHODS[name]} == {LOOKS}


def test_no_stage_of_a_recipe_gets_the_role_of_somebody_else_by_its_name() -> None:
    assert role_of("queue") is None
    for kind in ("feeder", "rollout", "reward", "reference", "trainer"):
        assert role_of(kind) == kind
    for name in ("operator", "reader", "submitter", "agent", "stage", "mine"):
        assert role_of(name) is MeshRole.STAGE
    for name in (*set(MeshRole) - WORKERS, "mine", "stage"):
        assert role_of_stage(name) is MeshRole.STAGE


def filled(message: Descriptor, stage: str, held: tuple[Uid, int], depth: int = 0) -> Message:
    """A message that means harm to the run `run`, in every field of which the name says what it is."""
    uid, token = held
    made: Any = GetMessageClass(message)()
    if message.name == "Uid":
        made.CopyFrom(codec.UID.encode(uid))
        return made
    values: dict[str, Any] = {
        "run": "run", "runs": "run", "stage": stage, "token": token, "tokens": token,
        "worker": "w", "owner": "me", "cursor": "moved", "reason": "because",
        "epoch": HIGH, "step": HIGH, "committed_step": HIGH, "feed_closed": True,
        "limit": 1, "at_least": 1, "groups": 1, "batch_id": "b",
    }  # fmt: skip
    for field in message.fields:
        repeated = field.is_repeated
        if field.message_type is not None:
            if depth < 4 and field.name not in ("header_of", "tasks"):
                inner = filled(field.message_type, stage, held, depth + 1)
                place = getattr(made, field.name)
                place.append(inner) if repeated else place.CopyFrom(inner)
        elif (value := values.get(field.name)) is not None:
            place = getattr(made, field.name)
            with suppress(TypeError):  # the name is another thing here
                place.append(value) if repeated else setattr(made, field.name, value)
        elif field.type == FieldDescriptor.TYPE_ENUM and not repeated:
            setattr(made, field.name, field.enum_type.values[-1].number)
    if message.name == "RunSpec":
        made.CopyFrom(codec.RUN_SPEC.encode(spec("run", stages=STAGES)))
    if message.name == "AdmitRequest":
        made.header.num_tasks = 1
        made.tasks.append(codec.TASK.encode(tasks(1, start=7)[0]))
    if message.name == "WriteRequest":
        made.Clear()
        made.header.run, made.header.stage = "run", stage
    return made


def has_stage(message: Descriptor) -> bool:
    """Whether a request names a stage that it is about."""
    return any(
        field.name == "stage" or (field.name == "header" and has_stage(field.message_type))
        for field in message.fields
    )


class Attacked:
    """A queue in which every stage holds a row, its servers, and a call of any method by any role."""

    def __init__(self, queue: TransferQueue, store: MemoryStore, run_dir: Path) -> None:
        self.queue = queue
        self.store = store
        self.run_dir = run_dir
        self.held: dict[str, tuple[Uid, int]] = {}
        self.address = ""

    async def prepare(self) -> None:
        queue = self.queue
        await queue.open_run(spec(stages=STAGES, max_staleness=5.0, lease_ttl_s=3600.0))
        epoch = (await queue.acquire("run", "trainer")).epoch
        await queue.publish("run", version := Version(epoch, 0))
        await queue.admit("run", tasks(4), cursor="here", wait_s=0)
        rows = await queue.lease(["run"], "rollout", worker="w", limit=4, version=version, wait_s=0)
        await queue.write_rows(
            "run", "rollout", tokens_of(rows), [rollout_of(row, version) for row in rows.rows]
        )
        for stage in STAGES:
            lease = await queue.lease(
                ["run"], stage.name, worker="w", limit=1, version=version, wait_s=0
            )
            [(uid, token)] = tokens_of(lease).items()
            self.held[stage.name] = (uid, token)

    async def stored(self) -> list[Any]:
        """All that the queue keeps, and the turns of feeders."""
        await self.queue.run_state("run")  # once it is durable
        pieces = [list(piece) async for piece in self.store.export()]
        return [pieces, self.queue.runs]

    async def call(self, name: str, role: MeshRole, stage: str) -> grpc.StatusCode:
        method: MethodDescriptor = methods()[name]
        request = filled(method.input_type, stage, self.held.get(stage, self.held["rollout"]))
        asks, answers = method.client_streaming, method.server_streaming
        kind = f"{'stream' if asks else 'unary'}_{'stream' if answers else 'unary'}"
        metadata = (("authorization", f"Bearer {token_of(self.run_dir, role)}"),)
        async with grpc.aio.insecure_channel(self.address) as channel:
            data = request.SerializeToString()
            call = getattr(channel, kind)(name)(
                iter([data]) if asks else data, metadata=metadata, timeout=60
            )
            try:
                if answers:
                    async for _ in call:
                        break  # a stream that stands is accepted
                    call.cancel()
                else:
                    await call
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK


@asynccontextmanager
async def attacked(run_dir: Path) -> AsyncIterator[Attacked]:
    ensure_credentials(run_dir)
    store = MemoryStore()
    queue = await TransferQueue.open(store)
    settings = ServerSettings(
        metrics_port=None,
        drain_grace_s=0,
        verifiers=credentials.verifiers_file(run_dir),
    )
    servicers = [
        QueueServicer(queue),
        QueueAdminServicer(QueueAdmin(queue, store)),
    ]
    found = Attacked(queue, store, run_dir)
    await found.prepare()
    try:
        async with GrpcServer(settings, servicers) as server:
            found.address = server.address
            yield found
    finally:
        await queue.close()


@pytest.mark.parametrize("role", sorted(BELOW_TRAINER))
async def test_nothing_below_the_trainer_raises_an_epoch_a_step_or_a_cursor(
    role: MeshRole, tmp_path: Path
) -> None:
    for name in QUEUES:
        for stage in STAGES:
            async with attacked(tmp_path) as there:
                before = await there.queue.run_state("run")
                await there.call(name, role, stage.name)
                after = await there.queue.run_state("run")
                assert (after.epoch, after.published, after.committed_step) == (
                    before.epoch,
                    before.published,
                    before.committed_step,
                ), name
                if role is not FEEDER:
                    assert (after.cursor, after.feed_closed) == (before.cursor, False), name
            if not has_stage(methods()[name].input_type):
                break


@pytest.mark.parametrize("role", [MeshRole.READER, MeshRole.SUBMITTER, MeshRole.AGENT])
async def test_who_only_looks_changes_nothing(role: MeshRole, tmp_path: Path) -> None:
    async with attacked(tmp_path) as there:
        before = await there.stored()
        for name in QUEUES:
            for stage in STAGES:
                await there.call(name, role, stage.name)
                assert await there.stored() == before, name


def of_a_stage() -> Iterator[str]:
    return (
        name for name in QUEUES if has_stage(methods()[name].input_type) and METHODS[name] & WORKERS
    )


def test_the_methods_that_name_a_stage_are_found() -> None:
    found = {name.rpartition("/")[2] for name in of_a_stage()}
    assert found >= {"Lease", "Renew", "Write", "Append", "Fail", "Release"}


@pytest.mark.parametrize("role", sorted(WORKERS))
async def test_a_role_works_on_its_own_stages_only(role: MeshRole, tmp_path: Path) -> None:
    async with attacked(tmp_path) as there:
        before = await there.stored()
        for name in of_a_stage():
            for stage in STAGES:
                if role_of_stage(stage.name) is not role:
                    code = await there.call(name, role, stage.name)
                    assert code is grpc.StatusCode.PERMISSION_DENIED, (name, stage.name)
        assert await there.stored() == before
        for name in of_a_stage():
            for stage in STAGES:
                if role_of_stage(stage.name) is role:
                    code = await there.call(name, role, stage.name)
                    assert code is not grpc.StatusCode.PERMISSION_DENIED, (name, stage.name)


async def test_the_end_of_a_stream_ends_no_lease_of_another_role(tmp_path: Path) -> None:
    async with attacked(tmp_path) as there:
        held = {
            stage.name: next(
                grant
                for grants in there.queue._expiry._by_worker.values()
                for grant in grants
                if grant.mask and grant.stage == number
            )
            for number, stage in enumerate(STAGES)
        }
        before = {name: grant.deadline for name, grant in held.items()}
        await there.call("/meshrl.v1.Queue/Attend", MeshRole.ROLLOUT, "rollout")
        await until(lambda: held["rollout"].deadline != before["rollout"])
        after = {name: grant.deadline for name, grant in held.items()}
        assert {name for name in before if after[name] != before[name]} == {"rollout"}

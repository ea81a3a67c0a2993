"""A worker of 0.1 (commit 84f5608) beside services of today: refused in one line, by an answer that 0.1 ends with.

What its rollout service sent to its queue and to its trainer, as bytes. It calls the queue first, so it ends there
where callers are asked who they are; a trainer refuses its HELLO also where nobody is asked.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from meshrl.rpc import credentials
from meshrl.rpc.credentials import MeshRole
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1.errors_pb2 import ErrorDetail

from ..wire import Call, make_call, queue_server
from .weights_fleet import RUN, opened

GET_RUN_STATE = bytes.fromhex("0a0474696e79")
OPEN_RUN = bytes.fromhex(
    "0aff010a0474696e791004180421000000000000f03f2a4d0a07726f6c6c6f75741a06746f6b656e731a096c6f73735f6d61736b1a10726f"
    "6c6c6f75745f6c6f6770726f62731a057370616e731a0d726573706f6e73655f746578741a077265706c6963612a590a0672657761726412"
    "0d726573706f6e73655f7465787412096c6f73735f6d61736b1a067265776172641a117265776172645f636f6d706f6e656e74731a0b7265"
    "776172645f686173681a0d7265776172645f696e707574732a210a097265666572656e63651206746f6b656e731a0c7265665f6c6f677072"
    "6f627330014001480351000000000000144058046080808080106a046669666f7001"
)
HELLO = bytes.fromhex(
    "0a060a0474696e79124f0a09726f6c6c6f75742d30210000000000004e402a2732323162396232342d303232342d346135622d616535352d"
    "6165636662333435303633322f32373204676c6f6f3a0a686f73743a3234333339"
)


def said(call: Call) -> str:
    """The one line of a refusal."""
    assert not call.replies
    message = ErrorDetail.FromString(call.error).message
    assert message and "\n" not in message
    return message


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    credentials.ensure_credentials(tmp_path)
    return tmp_path


async def test_its_first_call_to_a_queue_is_refused(run_dir: Path) -> None:
    verifiers = credentials.verifiers_file(run_dir)
    async with (
        queue_server(verifiers=verifiers) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        first = await make_call(channel, "/meshrl.v1.Queue/GetRunState", [GET_RUN_STATE])
        assert first.status == "UNAUTHENTICATED"
        assert "needs a credential of the run" in said(first)


@pytest.mark.parametrize("role", [MeshRole.ROLLOUT, MeshRole.REWARD, MeshRole.REFERENCE])
async def test_with_a_credential_it_may_not_open_the_run_as_workers_of_0_1_do(
    run_dir: Path, role: MeshRole
) -> None:
    token = credentials.file_of_role(run_dir, role).read_text().strip()
    verifiers = credentials.verifiers_file(run_dir)
    async with (
        queue_server(verifiers=verifiers) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        header = (("authorization", f"Bearer {token}"),)
        opening = await make_call(channel, "/meshrl.v1.Queue/OpenRun", [OPEN_RUN], header)
        assert opening.status == "PERMISSION_DENIED"
        assert f"this caller has the role {role}" in said(opening)


async def test_its_hello_to_a_trainer_is_refused(tmp_path: Path) -> None:
    async with (
        opened("gloo", tmp_path) as fleet,
        grpc.aio.insecure_channel(f"127.0.0.1:{fleet.port}") as channel,
    ):
        hello = pb.ReplicaMessage.FromString(HELLO)
        hello.stamp.run = RUN
        join = await make_call(channel, "/meshrl.v1.Weights/Join", [hello.SerializeToString()])
        (answer,) = map(pb.PlaneMessage.FromString, join.replies)
        # After any other error 0.1 joins again, for ever.
        assert answer.abort.code == "user"
        assert answer.abort.message.startswith("rollout-0 runs meshrl 0.1")
        assert not fleet.coordinator.fleet().replicas

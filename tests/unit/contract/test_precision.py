"""Log-probs are rounded where rows are packed, and nothing else is."""

from __future__ import annotations

import numpy as np

from meshrl.contract.types import RowWrite, Uid, pack_rows
from meshrl.testing.contract.queue_actors import Actors, rollout_of, spec, tasks
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

THIRD = np.full(6, -1 / 3, np.float32)


def test_only_log_probs_are_rounded() -> None:
    uid = Uid(run="run", task="t", index=0, attempt=0)
    row = RowWrite(uid=uid, columns={"ref_logprobs": THIRD, "values": THIRD})
    [packed] = pack_rows({uid: 1}, [row], "fp16")
    [made] = packed.columns()
    assert made["ref_logprobs"].tolist() == [-0.333251953125] * 6
    assert made["values"].tolist() == THIRD.tolist()


async def test_a_queue_with_bf16_precision_writes_rounded_log_probs() -> None:
    queue = await TransferQueue.open(MemoryStore())
    queue.logprob_precision = "bf16"
    actors = Actors(queue)
    await actors.start(spec())
    await actors.feed(tasks(1))
    row = (await actors.lease()).rows[0]
    written = rollout_of(row, actors.version)
    columns = {**written.columns, "rollout_logprobs": THIRD}
    exact = RowWrite(uid=row.uid, columns=columns, facts=written.facts)
    await queue.write_rows("run", "rollout", {row.uid: row.token}, [exact])
    [read] = await queue.fetch_rows("run", [row.uid], ["rollout_logprobs", "tokens"])
    assert read["rollout_logprobs"].tolist() == [-0.333984375] * 6
    assert read["tokens"].tolist() == list(range(6))
    await queue.close()

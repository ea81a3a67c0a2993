"""A stage from outside the tree is one module and one entry in a recipe."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
from pathlib import Path

import pytest

from meshrl.cli.root import main
from meshrl.config import eval_spec, load_recipe, train_spec
from meshrl.contract.errors import ConfigError
from meshrl.contract.rows import column_text
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.testing.contract.queue_actors import Actors, task
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ..mesh import Mesh, make_mesh

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "extend.md"
KIND = "my_package.stages_repeats"
SMALL = ("actor.use_kl_loss=false", "data.train_batch_size=1", "reward.mixed_versions=allow")
"""For rows that the test makes itself."""


@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_package: None) -> Mesh:
    """A mesh whose recipe has the stage of the how-to, which lies in a package beside it."""
    found = re.search(
        r"^```python\n# stages_repeats.py\n(.*?)^```", HOW_TO.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    package = tmp_path / "path" / "my_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "stages_repeats.py").write_text(found[1])
    monkeypatch.syspath_prepend(str(package.parent))
    beside = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{beside}".rstrip(os.pathsep))
    stage = {"kind": KIND, "options": {"letters": 2}, "after": ["reward"], "workers": 2}
    return make_mesh(tmp_path, {"stages": {"repeats": stage}})


async def meshrl(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "meshrl.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def test_a_run_trains_on_rows_that_the_stage_has_seen(mesh: Mesh) -> None:
    code, out = await meshrl("config", "check", str(mesh.recipe))
    assert code == 0, out
    await asyncio.to_thread(mesh.run, "trainer.total_training_steps=2", "trainer.test_freq=-1")
    ledger = await mesh.ledger()
    assert ledger.balanced and ledger.trained == 2 * 16
    logs = {path.stem for path in (mesh.run_dir / "logs").glob("*.log")}
    assert {"repeats-0", "repeats-1"} <= logs


async def test_the_trainer_fetches_the_column_of_a_stage_from_outside(mesh: Mesh) -> None:
    recipe = load_recipe(mesh.recipe, SMALL)
    assert [stage.name for stage in eval_spec(recipe).stages] == ["rollout", "reward"]
    queue = await TransferQueue.open(MemoryStore())
    actors = Actors(queue, run=recipe.run.name)
    await actors.start(train_spec(recipe))
    await actors.feed([task("t", group_size=4, run=recipe.run.name)])
    async with GrpcServer(ServerSettings(), [QueueServicer(queue)]) as server:
        await server.ready()
        with mesh.serve("repeats", str(mesh.recipe), *SMALL, "--queue", server.address):
            await actors.work()
            batch = await actors.take(0, groups=1, wait_s=60.0)
    uids = [row.uid for row in batch.rows]
    columns = await queue.fetch_rows(recipe.run.name, uids, ["repeats", "response_text"])
    ledger = await actors.ledger()
    await queue.close()
    assert len(uids) == 4 and ledger.resident["taken"] == 4
    for row in columns:
        text = column_text(row["response_text"])
        pairs = list(itertools.pairwise(text))
        assert row["repeats"] == pytest.approx(1 - len(set(pairs)) / len(pairs))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            ["stages.repeats.options.leters=3"],
            "stages.repeats.options.leters: no such option; did you mean 'letters'?",
        ),
        (
            ["stages.repeats.kind=no_package.no_stage"],
            "stages.repeats.kind: cannot load 'no_package.no_stage': No module named 'no_package'",
        ),
        (
            ["stages.repeats.after=[rewards]"],
            "stages.repeats.after: the run has no stage 'rewards' before this one (it has rollout, reward)",
        ),
        (
            [f"stages.again.kind={KIND}"],
            "stages.again: repeats writes 'repeats' already",
        ),
        (
            [f"stages.reward.kind={KIND}"],
            "stages.reward: reward is a service of every mesh; want another name",
        ),
        (
            ["stages.repeats.knid=3"],
            "no such key 'stages.repeats.knid'; did you mean 'stages.repeats.kind'?",
        ),
        (["stages.repeats=3"], "stages.repeats: got 3, want a section with kind"),
    ],
)
def test_a_mistake_in_a_stage_is_one_line(mesh: Mesh, changes: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(mesh.recipe, changes)
    (only,) = str(caught.value).splitlines()
    assert line in only


def test_explain_lists_the_options_of_a_stage(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", "explain", f"stages.{KIND}"])
    assert not ended.value.code
    assert (
        f"stages.{KIND}.letters = 3  Length of what counts as a repetition."
        in capsys.readouterr().out
    )

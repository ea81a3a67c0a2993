"""`meshrl queue` on a run that serves callers' models: verified, backed up, restored, and what is wrong is said."""

from __future__ import annotations

import asyncio
from pathlib import Path

from click.testing import CliRunner

from meshrl.cli.commands.queue import queue
from meshrl.contract.types import CreateModel, TrainingRequest
from meshrl.trainer.hosted import FOLDER
from meshrl.trainer.hosted.host import HostedTraining
from tests.doubles.hosted import StandInBench


def said(*words: object, code: int = 0) -> str:
    ended = CliRunner().invoke(queue, [*map(str, words)])
    assert ended.exit_code == code, ended.output
    return ended.output


async def _serve(folder: Path) -> None:
    host = HostedTraining(folder, StandInBench())
    await host.open()
    verb = CreateModel(base_model="m", lora_rank=4)
    await host.submit(TrainingRequest(model="m", number=0, verb=verb))
    await host.result("m", 0, wait_s=10)
    await host.close()


def test_models_are_verified_backed_up_and_restored(tmp_path: Path) -> None:
    run, backup, recipe = tmp_path / "run", tmp_path / "backup", tmp_path / "my.yaml"
    asyncio.run(_serve(run / FOLDER))
    (run / "recipe.yaml").write_text("{}")
    recipe.write_text(f"run: {{dir: {tmp_path / 'new'}}}\nmodel: {{path: m}}\ntinker: {{}}\n")
    figures = "no problems: 1 model, 1 request, 0 to be done, 0 checkpoints"
    assert figures in said("verify", run)
    assert f"backed up to {backup}: {figures}" in said("backup", run, backup)
    assert figures in said("restore", backup, recipe)
    assert figures in said("verify", tmp_path / "new" / FOLDER)
    (journal,) = (backup / "models" / "m").glob("journal-*")
    data = bytearray(journal.read_bytes())
    data[40] ^= 1
    journal.write_bytes(data)
    assert "is damaged at byte 0" in said("verify", backup, code=1)

"""`meshrl sft`: a supervised warm start, in this process."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from meshrl.cli.options import json_option, recipe_argument
from meshrl.common.plain_text import counted, say, say_json
from meshrl.config.loading import Written
from meshrl.trainer.offline.config import SftConfig


@click.command()
@recipe_argument
@json_option
def sft(recipe: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Fine-tune on prompt/response rows as RECIPE says (keys: see meshrl.trainer.offline.config.SftConfig)."""
    config = Written.read(recipe, overrides).with_local_paths().as_config(SftConfig)
    # Imported here: with it comes torch, and a wrong recipe should be answered at once.
    from meshrl.trainer.offline.sft import SftProgress, run

    def report(progress: SftProgress) -> None:
        if as_json:
            say_json(json.dumps(asdict(progress)))
            return
        match = "" if progress.exact_match is None else f"  exact match {progress.exact_match:.3f}"
        say(
            f"step {progress.step}/{progress.steps}  loss {progress.loss:.4f}  "
            f"{progress.tokens_per_s:,.0f} tokens/s{match}"
        )

    done = run(config, report)
    if not as_json:
        say(f"{config.output_dir} after {counted(done.step, 'step')}, {done.seconds:.1f} s")

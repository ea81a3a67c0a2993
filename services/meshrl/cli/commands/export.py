"""`meshrl export`: a run's checkpoint as a Hugging Face directory that any engine reads."""

from __future__ import annotations

import re
from pathlib import Path

import click

from meshrl.cli.find_mesh import say_which
from meshrl.cli.options import PATH, RUN
from meshrl.common.plain_text import say
from meshrl.config.loading import load_run
from meshrl.contract.errors import NotFoundError, UserError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook, newest_run_dir


def _size(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", value):
        raise click.BadParameter(f"got {value!r}, want a whole number with KB, MB or GB: 5GB")
    return value


@click.command()
@click.argument("target", type=PATH)
@click.option("--run-dir", type=RUN, help="The run's directory; the newest one if not given.")
@click.option(
    "--checkpoint", type=PATH, help="A checkpoint directory; the run's newest if not given."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of the stored weights.",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    callback=_size,
    help="Of one safetensors file: a number with MB or GB; larger models get several.",
)
@click.option(
    "--adapter", is_flag=True, help="Write the LoRA adapter as peft reads it, not merged."
)
@click.option("--force", is_flag=True, help="Replace TARGET if it is there.")
def export(
    target: Path,
    run_dir: Path | None,
    checkpoint: Path | None,
    dtype: str,
    max_shard_size: str,
    adapter: bool,
    force: bool,
) -> None:
    """Write the newest checkpoint of a run to TARGET: config, safetensors, tokenizer; LoRA is merged."""
    directory = run_dir if run_dir is not None else newest_run_dir()
    address_book = AddressBook.load(directory / ADDRESS_BOOK_NAME)
    say_which(directory, address_book.run)
    recipe = load_run(address_book.recipe)
    source = checkpoint if checkpoint is not None else recipe.checkpoint_dir
    if not source.is_dir():
        raise NotFoundError(f"no checkpoint yet: {source} is not there")
    if target.exists() and not force:
        raise UserError(f"{target} is there already; choose another, or give --force")
    # Imported here: with it comes torch.
    from meshrl.trainer.checkpoint.export import export_checkpoint

    made = export_checkpoint(
        source,
        target,
        model=recipe.model.path,
        tokenizer=recipe.tokenizer_dir,
        dtype=dtype,
        max_shard_size=max_shard_size,
        adapter_only=adapter,
    )
    readers = "peft, vLLM or SGLang, as an adapter" if adapter else "transformers, vLLM or SGLang"
    say(f"{made}: run {address_book.run}, {source}: load it with {readers}")

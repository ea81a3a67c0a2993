"""`meshrl export`: a run's checkpoint as a Hugging Face directory that any engine reads."""

from __future__ import annotations

import re
from pathlib import Path

import click

from meshrl.cli.find_mesh import say_which
from meshrl.cli.options import PATH, NamedRun, names_run
from meshrl.common.plain_text import say
from meshrl.config.loading import load_run
from meshrl.contract.errors import NotFoundError, UserError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook


def _size(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", value):
        raise click.BadParameter(f"got {value!r}, want a whole number with KB, MB or GB: 5GB")
    return value


@click.command()
@names_run(behind="target")
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
    named: NamedRun,
    target: str,
    checkpoint: Path | None,
    dtype: str,
    max_shard_size: str,
    adapter: bool,
    force: bool,
) -> None:
    """Write the newest checkpoint of RUN (the newest one here if not given) to TARGET, a Hugging Face directory.

    It holds config, safetensors and tokenizer; LoRA is merged.
    """
    folder, directory = Path(target), named.directory
    address_book = AddressBook.load(directory / ADDRESS_BOOK_NAME)
    say_which(directory, address_book.run)
    recipe = load_run(address_book.recipe)
    source = checkpoint if checkpoint is not None else recipe.checkpoint_dir
    if not source.is_dir():
        raise NotFoundError(f"no checkpoint yet: {source} is not there")
    if folder.exists() and not force:
        raise UserError(f"{target} is there already; choose another, or give --force")
    # Imported here: with it comes torch.
    from meshrl.trainer.checkpoint.export import export_checkpoint

    made = export_checkpoint(
        source,
        folder,
        model=recipe.model.path,
        tokenizer=recipe.tokenizer_dir,
        dtype=dtype,
        max_shard_size=max_shard_size,
        adapter_only=adapter,
    )
    readers = "peft, vLLM or SGLang, as an adapter" if adapter else "transformers, vLLM or SGLang"
    say(f"{made}: run {address_book.run}, {source}: load it with {readers}")

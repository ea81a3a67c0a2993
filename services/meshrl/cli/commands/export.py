"""`meshrl export`: a run's checkpoint as a Hugging Face directory that any engine reads."""

from __future__ import annotations

import re
from pathlib import Path

import click

from meshrl.cli.find_mesh import say_which
from meshrl.cli.options import PATH, NamedRun, names_run
from meshrl.common.plain_text import say
from meshrl.config import hub
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
    help="Type of the stored weights.",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    callback=_size,
    help="Size of one safetensors file: a number with MB or GB; larger models get several.",
)
@click.option(
    "--adapter", is_flag=True, help="Write the LoRA adapter as peft reads it, not merged."
)
@click.option(
    "--push",
    metavar="ORG/NAME",
    help="Upload TARGET to this model of the Hugging Face hub too, which is made private where it is missing.",
)
@click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
def export(
    named: NamedRun,
    target: str,
    checkpoint: Path | None,
    dtype: str,
    max_shard_size: str,
    adapter: bool,
    push: str | None,
    force: bool,
) -> None:
    """Write the newest checkpoint of RUN (the newest one here if not given) to TARGET, a Hugging Face directory.

    It holds config, safetensors and tokenizer; LoRA is merged.
    """
    if push is not None and not hub.NAME.fullmatch(push):
        raise UserError(f"--push {push}: want ORG/NAME")
    folder, directory = Path(target), named.directory
    address_book = AddressBook.load(directory / ADDRESS_BOOK_NAME)
    say_which(directory, address_book.run)
    recipe = load_run(address_book.recipe)
    source = checkpoint if checkpoint is not None else recipe.checkpoint_dir
    if not source.is_dir():
        raise NotFoundError(f"no checkpoint yet: {source} does not exist")
    if folder.exists() and not force:
        raise UserError(f"{target} already exists; choose another, or give --force")
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
    if push is not None:
        hub.upload(made, push, f"{address_book.run}, {source.name}")
    say(f"{made}: run {address_book.run}, {source}: load it with {readers}")

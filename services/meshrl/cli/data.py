"""`meshrl data`: the rows of a recipe's data files, as training would read them. Imports no torch."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from meshrl.cli.options import LIMIT, json_option, recipe_argument
from meshrl.common.plain_text import counted, say, say_json
from meshrl.config import Recipe, load_recipe
from meshrl.config.checks import unusable
from meshrl.config.stages import vocabulary
from meshrl.contract.errors import UserError
from meshrl.launcher.prompts import image_processor
from meshrl.rpc.exit_codes import Exit
from meshrl.trainer.data.files import FileRow, file_rows, rows_of
from meshrl.trainer.data.prompt_streams import quotas
from meshrl.trainer.data.prompt_tokenizer import load_prompt_tokenizer
from meshrl.trainer.data.prompts import expanded, prompt_ids, prompt_text, read_prompt_row
from meshrl.trainer.data.reasoning_gym import gym_rows
from meshrl.trainer.data.statistics import Repeats, SplitStatistics, leaked, repeated, scan

BAR = 40
"""Characters of the longest bar of a histogram."""
TRAIN, HELD_OUT = "train", "held out"


@click.group()
def data() -> None:
    """Check, show and count the rows of a recipe's data files, as training reads them."""


@data.command()
@recipe_argument
@json_option
@click.option(
    "--limit", type=LIMIT, default=20, show_default=True, help="Most bad rows to name; 0 for all."
)
@click.option("--strict", is_flag=True, help="Exit with 2 for warnings too.")
def check(
    recipe: Path, overrides: tuple[str, ...], as_json: bool, limit: int, strict: bool
) -> None:
    """Read every row: name those that would end the feeder, that are too long, that repeat, or that leak.

    Exits with 2 where a row is bad.
    """
    scanned = _Scanned(recipe, overrides, limit)
    warnings = list(scanned.warnings())
    if as_json:
        say_json(json.dumps({**scanned.facts(), "warnings": warnings}, indent=2))
    else:
        for warning in warnings:
            say(f"warning: {warning}", err=True)
        for split in scanned.splits:
            say(f"{split.name}: {counted(split.rows, 'good row')}, {split.bad:,} bad")
    sys.exit(Exit.USER_ERROR if scanned.bad or (strict and warnings) else Exit.DONE)


@data.command()
@recipe_argument
@json_option
def stats(recipe: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Count: rows, tokens of prompts and their histogram, rows of each source, repetitions.

    Exits with 2 where a row is bad; `meshrl data check` names all of them.
    """
    scanned = _Scanned(recipe, overrides, 1)
    if as_json:
        say_json(json.dumps(scanned.facts(), indent=2))
    else:
        for split in scanned.splits:
            for line in _table(split, scanned.recipe):
                say(line)
        for warning in scanned.warnings():
            say(warning)
    sys.exit(Exit.USER_ERROR if scanned.bad else Exit.DONE)


@data.command()
@recipe_argument
@json_option
@click.option("--at", metavar="FILE:ROW", help="This row, as messages name it.")
@click.option("--held-out", is_flag=True, help="Rows for evaluation.")
@click.option("--limit", type=LIMIT, default=3, show_default=True, help="Rows to show; 0 for all.")
def show(
    recipe: Path,
    overrides: tuple[str, ...],
    as_json: bool,
    at: str | None,
    held_out: bool,
    limit: int,
) -> None:
    """Print rows as the model reads them: system prompt, examples and chat template applied."""
    loaded = load_recipe(recipe, overrides, check=False)
    tokenizer = load_prompt_tokenizer(loaded.tokenizer_dir)
    images = image_processor(loaded)
    rows = _rows(loaded, held_out=held_out) if at is None else iter([_row(loaded, at)])
    for source in itertools.islice(rows, limit or None):
        row = read_prompt_row(source, loaded.data, pictures=images is not None)
        text = prompt_text(row, loaded.data, tokenizer)
        plain = isinstance(row.prompt, str)
        ids = prompt_ids(text, source.where, tokenizer, plain=plain)
        added = len(ids) - len(tokenizer.encode(text, add_special_tokens=False))
        facts = {
            "where": source.where,
            "data_source": row.data_source,
            "tokens": len(expanded(ids, row, images)),
            "pictures": [each.sha256 for each in row.media],
            "text": tokenizer.decode(ids[:added].tolist()) + text if added else text,
            "ground_truth": row.ground_truth,
            "extra_info": dict(row.extra_info),
        }
        if as_json:
            say_json(json.dumps(facts, ensure_ascii=False))
        else:
            say(_shown(facts), lines=True)


def _row(recipe: Recipe, at: str) -> FileRow:
    """The row `file:number`. Raises UserError: there is none, or it is bad."""
    rows = rows_of(Path(at.rpartition(":")[0]), recipe.data.reader)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            raise UserError(f"no row {at}") from None
        except UserError as error:
            if str(error).startswith(f"{at}:"):
                raise
        else:
            if row.where == at:
                return row


def _rows(recipe: Recipe, *, held_out: bool) -> Iterator[FileRow]:
    files = recipe.data.val_files if held_out else recipe.data.train_files
    gym = recipe.data.reasoning_gym
    made = gym_rows(gym, held_out=held_out) if gym else iter(())
    return itertools.chain(file_rows(files, recipe.data.reader), made)


def _shown(facts: dict[str, Any]) -> str:
    named = f"  {facts['data_source']}" if facts["data_source"] else ""
    answer = json.dumps(facts["ground_truth"], ensure_ascii=False)
    lines = [
        f"── {facts['where']}  {facts['tokens']} tokens{named}",
        facts["text"],
        f"── answer {answer}",
    ]
    if facts["pictures"]:
        lines.append(f"── pictures {', '.join(name[:12] for name in facts['pictures'])}")
    if facts["extra_info"]:
        lines.append(f"── extra_info {json.dumps(facts['extra_info'], ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


class _Scanned:
    """All rows of a recipe, read once; bad ones are named on stderr, at most `limit` of them."""

    def __init__(self, path: Path, overrides: tuple[str, ...], limit: int) -> None:
        self.recipe = load_recipe(path, overrides, check=False)
        data, self._limit, self._named = self.recipe.data, limit, 0
        tokenizer = load_prompt_tokenizer(self.recipe.tokenizer_dir)
        images = image_processor(self.recipe)
        gym = data.reasoning_gym
        self.splits = [
            scan(
                name, files, gym_rows(gym, held_out=name == HELD_OUT) if gym else iter(()),
                data, tokenizer, self._name, images, vocabulary(self.recipe),
                partial(unusable, self.recipe),
            )
            for name, files in ((TRAIN, data.train_files), (HELD_OUT, data.val_files))
            if files or gym
        ]  # fmt: skip
        if not self.splits:
            raise UserError("data.train_files and data.val_files are empty")
        self.bad = sum(split.bad for split in self.splits)
        if limit and self.bad > limit:
            say(f"error: … and {self.bad - limit:,} more (--limit 0 names all)", err=True)
        self._repeats = {split.name: repeated(split) for split in self.splits}
        self._leaked = leaked(self.splits[1], self.splits[0]) if len(self.splits) > 1 else None

    def _name(self, line: str) -> None:
        self._named += 1
        if not self._limit or self._named <= self._limit:
            say(f"error: {line}", err=True)

    def warnings(self) -> Iterator[str]:
        """Oddities of the data that would not stop a run."""
        for split in self.splits:
            if split.too_long:
                limit, first = self.recipe.data.max_prompt_length, split.first_too_long
                done = "skipped" if self.recipe.data.filter_overlong_prompts else "cut"
                yield (
                    f"{split.name}: {counted(split.too_long, 'row')} longer than data.max_prompt_length {limit}:"
                    f" {done}, the first at {first}"
                )
            yield from _said(
                f"{split.name}: {{}} with a prompt that came before",
                "row",
                self._repeats[split.name],
            )
        if self._leaked is not None:
            yield from _said("{} with a prompt that is trained on", "held-out row", self._leaked)

    def facts(self) -> dict[str, Any]:
        """For programs."""
        known: dict[str, Any] = {
            split.name.replace(" ", "_"): _facts(split, self._repeats[split.name])
            for split in self.splits
        }
        return known | {"leaked": _repeats(self._leaked) if self._leaked else None}


def _said(text: str, what: str, repeats: Repeats) -> Iterator[str]:
    if repeats.rows:
        pairs = "; ".join(f"{one} = {other}" for one, other in repeats.examples)
        more = "; …" if repeats.rows > len(repeats.examples) else ""
        yield f"{text.format(counted(repeats.rows, what))}: {pairs}{more}"


def _repeats(repeats: Repeats) -> dict[str, Any]:
    return {"rows": repeats.rows, "examples": repeats.examples}


def _facts(split: SplitStatistics, repeats: Repeats) -> dict[str, Any]:
    return {
        "rows": split.rows,
        "bad": split.bad,
        "too_long": split.too_long,
        "tokens": split.tokens,
        "mean": split.tokens / split.rows,
        **{f"p{share}": split.quantile(share / 100) for share in (50, 95, 99)},
        "max": split.longest[0],
        "longest": split.longest[1],
        "histogram": split.histogram(),
        "sources": dict(split.sources.most_common()),
        "repeated": _repeats(repeats),
    }


def _table(split: SplitStatistics, recipe: Recipe) -> Iterator[str]:
    yield f"{split.name}: {counted(split.rows, 'row')}, {counted(split.tokens, 'token')} of prompts"
    length, where = split.longest
    middle, most = split.quantile(0.5), split.quantile(0.95)
    mean = split.tokens / split.rows
    yield f"  a row: mean {mean:.0f}, median {middle}, 95 % up to {most}, longest {length} ({where})"
    buckets = split.histogram()
    largest, width = max(rows for *_, rows in buckets), len(f"{buckets[-1][1]}")
    for first, last, rows in buckets:
        bar = "█" * (max(1, round(BAR * rows / largest)) if rows else 0)
        yield f"  {first:>{width}}-{last:<{width}} {bar} {rows:,}".rstrip()
    for name, rows in split.sources.most_common():
        yield f"  {name or '(no data_source)'}: {counted(rows, 'row')}"
    if split.weighted:
        for name, count in quotas(recipe.data.weights, split.weighted).items():
            rows = split.weighted[name]
            yield f"  an epoch asks {count:,} of {name}: each of its {rows:,} rows {count / rows:.2f} times"

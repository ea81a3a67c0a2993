"""`meshrl rows`: what the model said, what it got for it, and what training made of it; read from the run's files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from meshrl.api.rows import Row, find_rows
from meshrl.cli.find_mesh import say_which
from meshrl.cli.options import RUN
from meshrl.common.plain_text import counted, harmless, one_line, say, say_json
from meshrl.contract.errors import UserError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook, newest_run_dir
from meshrl.launcher.text_console import text_console
from meshrl.trainer.trajectories.files import FOLDER
from meshrl.trainer.trajectories.pictures import described

PLACES = re.compile(r"(<\|[a-z_]+\|>)(?: ?\1){3,}")
"""A picture has a token for each of its patches."""
LISTED, WHOLE = 20, 8
"""Rows that are shown where `--limit` is not given: as a list, and whole."""


@click.command()
@click.argument("run", type=RUN, required=False, envvar="MESHRL_RUN_DIR")
@click.option(
    "--step",
    metavar="N|N-M|all",
    help="Rows of these steps; the newest one if not given, and all of them with --uid.",
)
@click.option("--eval", "held_out", is_flag=True, help="Held-out rows instead of trained ones.")
@click.option("--worst", is_flag=True, help="The lowest rewards first.")
@click.option("--best", is_flag=True, help="The highest rewards first.")
@click.option("--uid", metavar="U", help="One row, or all rows of a task, whole.")
@click.option("--where", metavar="EXPR", help="For example 'reward < 0.5 and staleness > 1'.")
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Most rows; {LISTED} if not given, 0 for all."
)
@click.option("--json", "as_json", is_flag=True, help="A JSON object per line, all columns.")
def rows(
    run: Path | None,
    step: str | None,
    held_out: bool,
    worst: bool,
    best: bool,
    uid: str | None,
    where: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """Show the rows of RUN, a run's directory (the newest one here if not given), while it runs or afterwards."""
    if worst and best:
        raise UserError("--worst and --best exclude each other")
    directory = run if run is not None else newest_run_dir()
    most = limit if limit is not None else WHOLE if uid else LISTED
    found = find_rows(
        directory,
        step=step,
        held_out=held_out,
        where=where,
        uid=uid,
        order="worst" if worst else "best" if best else None,
        most=most or math.inf,
        per_token=as_json,
    )
    if as_json:
        for row in found:
            say_json(json.dumps(row, ensure_ascii=False))
        return
    _say_which(directory)
    shown = list(found)
    if not shown:
        say("no logged row is like that")
        return
    console = text_console()
    if uid is not None:
        for row in shown:
            _print_whole(console, row, directory)
    else:
        _print_list(console, shown, ranked=worst or best)


def _say_which(directory: Path) -> None:
    book = directory / ADDRESS_BOOK_NAME
    if book.is_file():
        say_which(directory, AddressBook.load(book).run)


def _print_list(console: Console, shown: Sequence[Row], *, ranked: bool) -> None:
    """A line per row; rows of one group stand under their prompt, unless they are ranked."""

    def line(name: str, facts: Sequence[str], text: str, style: str = "") -> None:
        start = f"{name:<17}" + "".join(
            f"{fact:>{width}}" for fact, width in zip(facts, (8, 8, 6, 6), strict=True)
        )
        whole = Text(harmless(f"{start}  {text}"), style=style)
        whole.truncate(console.width, overflow="ellipsis")
        console.print(whole)

    line("row", ("reward", "advant.", "stale", "len"), "response", "dim")
    for (step, task), group in groupby(shown, key=lambda row: (row["step"], row["task"])):
        for at, row in enumerate(group):
            if at == 0 and not ranked:
                begins = f"step {step}, task {_short(task)}: {one_line(_prompt(row))}"
                prompt = Text(harmless(begins), style="bold")
                prompt.truncate(console.width, overflow="ellipsis")
                console.print(prompt)
            name, said = f"{row['index']}.{row['attempt']}", one_line(row["response"])
            facts = (
                _number(row["reward"], 3),
                _number(row["advantage"], 3),
                str(row["staleness"]),
                str(row["length"]),
            )
            line(f"{_short(task)}/{name}" if ranked else f"  {name}", facts, said)


def _print_whole(console: Console, row: Row, directory: Path) -> None:
    """Everything of a row but its tokens."""
    console.rule(Text(row["uid"]), align="left")
    reward = [_number(row["reward"], 4)]
    reward += [f"{harmless(name)} {value:.4g}" for name, value in row["reward_components"].items()]
    spans = [f"{s['epoch']}.{s['step']} [{s['start']}, {s['end']})" for s in row["spans"] or ()]
    turns = counted(row["turns"], "turn")
    facts = {
        row[
            "split"
        ]: f"step {row['step']}, {row['outcome'] or 'scored'}, by {row['worker'] or '?'}",
        "reward": ", ".join(reward),
        **{f"{harmless(name)}:": text for name, text in row["reward_texts"].items()},
        "advantage": f"{_number(row['advantage'], 4)}, mismatch {_number(row['mismatch'], 4)}",
        "tokens": f"{row['prompt_length']} + {row['length']}, {turns} of the policy",
        "versions": f"{', '.join(spans)}; staleness {row['staleness']}",
        "times": _times(row),
        "source": row["data_source"],
        "answer": row["ground_truth"],
        "extra": row["extra_info"],
    }
    for name, value in facts.items():
        if value not in (None, "", "null", "{}"):
            console.print(
                Text(f"{name:10} ", style="dim") + Text(harmless(value, lines=True)), soft_wrap=True
            )
    pictures = described(directory / FOLDER, row.get("pictures") or (), thumbnails=False)
    for number, picture in enumerate(pictures, 1):
        size = picture["problem"] or f"{picture['bytes']} bytes"
        console.print(
            Text(f"picture {number:<3}", style="dim")
            + Text(f"{harmless(picture['name'])}, {size}"),
            soft_wrap=True,
        )
    console.print(Text("prompt", style="bold"))
    console.print(Text(harmless(_prompt(row), lines=True)), soft_wrap=True)
    for message in row.get("conversation") or ():
        for call in message["tool_calls"] or ():
            called = f"{call['name']}({call['arguments']})"
            console.print(
                Text("calls      ", style="dim") + Text(harmless(called, lines=True)),
                soft_wrap=True,
            )
    parts = row["parts"] or [{"sampled": True, "text": row["response"]}]
    for part in parts:
        console.print(Text("policy" if part["sampled"] else "observed", style="bold"))
        console.print(Text(harmless(part["text"] or "", lines=True)), soft_wrap=True)


def _prompt(row: Row) -> str:
    """As text: its tokens, of the equal ones of a picture one, or without a tokenizer its messages."""
    if row["prompt"] is not None:
        return PLACES.sub(lambda run: f"{run[1]}×{run[0].count(run[1])}", str(row["prompt"]))
    return "\n".join(f"{m['role']}: {m['content']}" for m in row["messages"] or ())


def _times(row: Row) -> str:
    """Where its time went; empty for rows whose workers noted none."""
    names = {"sample_s": "sampled", "score_wait_s": "waited for its judge", "score_s": "scored"}
    names |= {"train_wait_s": "waited to be trained"}
    known = {said: row.get(name) for name, said in names.items() if row.get(name) is not None}
    return ", ".join(f"{said} {seconds:.2f} s" for said, seconds in known.items())


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _short(task: str) -> str:
    """The end of a long task id, which tells it from others."""
    return task if len(task) <= 12 else f"…{task[-11:]}"

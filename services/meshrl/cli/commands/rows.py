"""`meshrl rows`: what the model said, what it got for it, and what training made of it; read from the run's files."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeAlias

import click
from rich.console import Console
from rich.text import Text

from meshrl.cli.find_mesh import say_which
from meshrl.cli.options import PATH
from meshrl.cli.plain_text import one_line, printable
from meshrl.contract.errors import UserError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook, newest_run_dir
from meshrl.trainer.trajectories.files import FOLDER, LoggedFile, logged_files

LISTED, WHOLE = 20, 8
"""Rows that are shown where `--limit` is not given: as a list, and whole."""
Row: TypeAlias = Mapping[str, Any]
Test: TypeAlias = Callable[[Row], bool]


@click.command()
@click.argument("run", type=PATH, required=False, envvar="MESHRL_RUN_DIR")
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
    # Imported here, like pyarrow later: a wrong option is answered at once.
    from meshrl.trainer.trajectories.where import condition

    tests = [condition(where)] if where is not None else []
    if uid is not None:
        tests.append(_named(uid))
    directory = run if run is not None else newest_run_dir()
    files = _chosen(directory, step or ("all" if uid else None), held_out)
    most = limit if limit is not None else WHOLE if uid else LISTED
    found = _found(files, tests, worst=worst, best=best, most=most or math.inf, whole=as_json)
    if as_json:
        for row in found:
            click.echo(json.dumps(row, ensure_ascii=False))
        return
    _say_which(directory)
    shown = list(found)
    if not shown:
        click.echo("no logged row is like that")
        return
    console = Console(highlight=False)
    if uid is not None:
        for row in shown:
            _print_whole(console, row)
    else:
        _print_list(console, shown, ranked=worst or best)


def _chosen(directory: Path, step: str | None, held_out: bool) -> list[LoggedFile]:
    """The files to look into, the newest first. Raises UserError where there is none."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; want a run's, such as runs/demo")
    kind = "evaluation" if held_out else "step"
    files = logged_files(directory / FOLDER, "eval" if held_out else "train")[::-1]
    if not files:
        raise UserError(f"{directory}: no rows of any {kind} are logged there (trainer.log_rows)")
    if step is None:
        return files[:1]
    low, high = _steps(step)
    chosen = [file for file in files if low <= file.step <= high]
    if not chosen:
        raise UserError(
            f"--step {step}: no rows are logged of it; there are {len(files)} {kind}s"
            f" from {files[-1].step} to {files[0].step}"
        )
    return chosen


def _steps(text: str) -> tuple[float, float]:
    if text == "all":
        return 0, math.inf
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
        raise UserError(f"--step {text}: want a number, two with a dash (10-20), or all")
    return int(first), int(last) if dash else int(first)


def _named(uid: str) -> Test:
    """Whether a row is `run/task/index.attempt`, or that without the run, or one of a task."""
    return lambda row: (
        uid
        in (
            row["uid"],
            f"{row['task']}/{row['index']}.{row['attempt']}",
            row["task"],
        )
    )


def _found(
    files: Sequence[LoggedFile],
    tests: Sequence[Test],
    *,
    worst: bool,
    best: bool,
    most: float,
    whole: bool,
) -> Iterator[Row]:
    """At most `most` rows, in the order in which they are shown; `whole`: with the columns of every token."""
    from meshrl.trainer.trajectories.reading import read_rows

    matching: Iterator[tuple[LoggedFile, Row]] = (
        (file, row)
        for file in files
        for row in read_rows(file.path)
        if all(test(row) for test in tests)
    )
    if worst or best:
        scored = ((file, row) for file, row in matching if row["reward"] is not None)
        sign = 1 if worst else -1
        if math.isinf(most):
            ranked = sorted(scored, key=lambda pair: sign * pair[1]["reward"])
        else:
            ranked = heapq.nsmallest(int(most), scored, key=lambda pair: sign * pair[1]["reward"])
        matching = iter(ranked)
    if not math.isinf(most):
        matching = islice(matching, int(most))
    if not whole:
        yield from (row for _, row in matching)
        return
    for file, pairs in groupby(matching, key=lambda pair: pair[0]):
        uids = [row["uid"] for _, row in pairs]
        full = {row["uid"]: row for row in read_rows(file.path, per_token=True, uids=uids)}
        yield from (full[uid] for uid in uids if uid in full)


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
        whole = Text(f"{start}  {text}", style=style)
        whole.truncate(console.width, overflow="ellipsis")
        console.print(whole)

    line("row", ("reward", "advant.", "stale", "len"), "response", "dim")
    for (step, task), group in groupby(shown, key=lambda row: (row["step"], row["task"])):
        for at, row in enumerate(group):
            if at == 0 and not ranked:
                prompt = Text(
                    f"step {step}, task {_short(task)}: {one_line(_prompt(row))}", style="bold"
                )
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


def _print_whole(console: Console, row: Row) -> None:
    """Everything of a row but its tokens."""
    console.rule(Text(row["uid"]), align="left")
    reward = [_number(row["reward"], 4)]
    reward += [f"{printable(name)} {value:.4g}" for name, value in row["reward_components"].items()]
    spans = [f"{s['epoch']}.{s['step']} [{s['start']}, {s['end']})" for s in row["spans"] or ()]
    facts = {
        row[
            "split"
        ]: f"step {row['step']}, {row['outcome'] or 'scored'}, by {row['worker'] or '?'}",
        "reward": ", ".join(reward),
        "advantage": f"{_number(row['advantage'], 4)}, mismatch {_number(row['mismatch'], 4)}",
        "tokens": f"{row['prompt_length']} + {row['length']}, {row['turns']} turns of the policy",
        "versions": f"{', '.join(spans)}; staleness {row['staleness']}",
        "source": row["data_source"],
        "answer": row["ground_truth"],
        "extra": row["extra_info"],
    }
    for name, value in facts.items():
        if value not in (None, "", "null", "{}"):
            console.print(Text(f"{name:10} ", style="dim") + Text(printable(value)), soft_wrap=True)
    console.print(Text("prompt", style="bold"))
    console.print(Text(printable(_prompt(row))), soft_wrap=True)
    parts = row["parts"] or [{"sampled": True, "text": row["response"]}]
    for part in parts:
        console.print(Text("policy" if part["sampled"] else "observed", style="bold"))
        console.print(Text(printable(part["text"] or "")), soft_wrap=True)


def _prompt(row: Row) -> str:
    """As text: its tokens, or where no tokenizer could be read its messages."""
    if row["prompt"] is not None:
        return str(row["prompt"])
    return "\n".join(f"{m['role']}: {m['content']}" for m in row["messages"] or ())


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _short(task: str) -> str:
    """The end of a long task id, which tells it from others."""
    return task if len(task) <= 12 else f"…{task[-11:]}"

"""`meshrl rows`: what the model said, what it got for it, and what training made of it; read from the run's files."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshrl.api import Row, find_rows, prompt_of, said_in
from meshrl.cli.find_mesh import say_which
from meshrl.cli.options import LIMIT, Finite, NamedRun, json_option, names_run, run_at
from meshrl.common.plain_text import counted, harmless, one_line, say, say_json
from meshrl.config.loading import load_run
from meshrl.config.recipe import Recipe
from meshrl.contract.errors import NotFoundError, UserError
from meshrl.contract.types import Uid
from meshrl.http.view.metrics import SpanFiles
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook
from meshrl.launcher.text_console import text_console
from meshrl.rpc.exit_codes import Exit
from meshrl.trainer.trajectories.files import FOLDER, described

PLACES = re.compile(r"(<\|[a-z_]+\|>)(?: ?\1){3,}")
"""A picture has a token for each of its patches."""
LISTED, WHOLE = 20, 8
"""Rows that are shown where `--limit` is not given: as a list, and whole."""

TOLERANCE = 1e-6
WAIT_S = 0.05
"""Shorter gaps between the services are not worth a line."""


@click.command()
@names_run()
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
@click.option("--limit", type=LIMIT, help=f"Most rows; {LISTED} if not given, 0 for all.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object per line, all columns.")
def rows(
    named: NamedRun,
    step: str | None,
    held_out: bool,
    worst: bool,
    best: bool,
    uid: str | None,
    where: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """Show the rows of RUN (the newest one here if not given), while it runs or afterwards."""
    if worst and best:
        raise UserError("--worst and --best exclude each other")
    directory = named.directory
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
    book = directory / ADDRESS_BOOK_NAME
    if book.is_file():
        say_which(directory, AddressBook.load(book).run)
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


def _print_list(console: Console, shown: Sequence[Row], *, ranked: bool) -> None:
    """Print a line per row; rows of a group are under their prompt, unless they are ranked."""

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

    def fact(name: str, value: str) -> None:
        said = Text(harmless(value, lines=True))
        console.print(Text(f"{name:10} ", style="dim") + said, soft_wrap=True)

    def passage(title: str, text: str) -> None:
        console.print(Text(title, style="bold"))
        console.print(Text(harmless(text, lines=True)), soft_wrap=True)

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
            fact(name, value)
    pictures = described(directory / FOLDER, row.get("pictures") or (), thumbnails=False)
    for number, picture in enumerate(pictures, 1):
        size = picture["problem"] or f"{picture['bytes']} bytes"
        fact(f"picture {number}", f"{picture['name']}, {size}")
    passage("prompt", _prompt(row))
    for message in row.get("conversation") or ():
        for call in message["tool_calls"] or ():
            fact("calls", f"{call['name']}({call['arguments']})")
    for who, text in said_in(row):
        passage(who, text)


def _prompt(row: Row) -> str:
    """The prompt as text, a token for each image."""
    return PLACES.sub(lambda run: f"{run[1]}×{run[0].count(run[1])}", prompt_of(row))


def _times(row: Row) -> str:
    """The times of a row; empty where its workers noted none."""
    names = {"sample_s": "sampled", "score_wait_s": "waited for its judge", "score_s": "scored"}
    names |= {"train_wait_s": "waited to be trained"}
    known = {said: row.get(name) for name, said in names.items() if row.get(name) is not None}
    return ", ".join(f"{said} {seconds:.2f} s" for said, seconds in known.items())


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _short(task: str) -> str:
    """The end of a long task id, which tells it from others."""
    return task if len(task) <= 12 else f"…{task[-11:]}"


@click.command()
@names_run()
@click.option("--step", type=click.IntRange(min=1), required=True, help="As in metrics.jsonl.")
@click.option(
    "--tolerance",
    type=Finite(min=0),
    default=TOLERANCE,
    show_default=True,
    help="The largest relative difference that counts as the same.",
)
@json_option
def replay(named: NamedRun, step: int, tolerance: float, as_json: bool) -> None:
    """Compute a step of RUN (the newest one here if not given) again, and compare.

    From the newest checkpoint before it, through the logged rows: log-probs, advantages, loss, gradient norm.
    The first row that differs is named, and the exit code is 1.
    """
    directory = named.directory
    address_book = AddressBook.load(directory / ADDRESS_BOOK_NAME)
    say_which(directory, address_book.run)
    recipe = load_run(address_book.recipe)
    _refuse_replay(recipe)
    find_rows(directory, step=str(step))  # raises at once for a step that is not logged
    # Imported here: with it comes torch.
    import torch

    from meshrl.launcher.learner import build_learner, training_steps
    from meshrl.trainer.checkpoint import checkpoint
    from meshrl.trainer.ranks.world import World
    from meshrl.trainer.trajectories.replay import replay, starting_point

    # As many as the services get: another number adds in another order.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    world = World.start("cpu")
    try:
        learner = build_learner(recipe, training_steps(recipe), world)
        start, first = starting_point(recipe.checkpoint_dir, step), 0
        if start is not None:
            state = checkpoint.load(
                start, learner.policy, learner.optimizers, beside=learner.beside
            )
            learner.kl_coef, first = state.kl_coef, state.step
        say(f"from {start or recipe.model.path}, step {first}", err=True)
        same = True
        for made in replay(
            learner,
            directory / FOLDER,
            directory / recipe.metrics_path.name,
            range(first + 1, step + 1),
            tolerance=tolerance,
        ):
            same = made.first is None
            if as_json:
                say_json(json.dumps(asdict(made)))
                continue
            figures = ", ".join(f"{name} {value:.6g}" for name, value in made.figures.items())
            worst = max(made.largest.items(), key=lambda one: one[1])
            say(
                f"step {made.step}: {counted(made.rows, 'row')}, {figures}; largest relative difference"
                f" {worst[1]:.1e} ({worst[0]})"
            )
            if made.first is not None:
                say(f"step {made.step} differs: {made.first}")
    finally:
        world.close()
    if not same:
        sys.exit(Exit.FAILED)


def _refuse_replay(recipe: Recipe) -> None:
    """Raises UserError: what the estimator started from cannot be told from what is logged."""
    algorithm = recipe.algorithm
    if recipe.reward.token_rewards and (
        algorithm.use_kl_in_reward or algorithm.overlong_buffer.enable
    ):
        raise UserError(
            "reward.token_rewards together with a penalty in the reward: rows are logged with the sum alone, and no"
            " step can be replayed"
        )


@click.command()
@names_run(behind="uid")
@json_option
def trace(named: NamedRun, uid: str, as_json: bool) -> None:
    """Show what happened to the row UID (run/task/index.attempt; the run may be left out), and how long it took.

    Rows are traced with run.trace=SHARE, by group: all attempts of a row together.
    """
    directory = (named.path is None and run_at(Path(uid.partition("/")[0]))) or named.directory
    run = AddressBook.load(directory / ADDRESS_BOOK_NAME).run
    say_which(directory, run)
    row = _parsed_uid(uid, run)
    files = SpanFiles(directory)
    spans = files.row(row)
    if not spans:
        raise NotFoundError(
            files.problem or f"row {row} was not traced; run.trace=1 traces all rows"
        )
    if as_json:
        for span in spans:
            say_json(json.dumps(span))
        return
    text_console().print(_spans_table(spans))


def _parsed_uid(uid: str, run: str) -> Uid:
    for text in (uid, f"{run}/{uid}"):
        try:
            found = Uid.parse(text)
        except ValueError:
            continue
        if found.run == run:
            return found
    raise UserError(f"{uid!r} is not a row of run {run}: want {run}/task/index.attempt")


def _spans_table(spans: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column, right in (("from s", True), ("took s", True), ("where", False), ("what", False)):
        # Only what was done may wrap: figures that are cut say nothing.
        table.add_column(
            column, justify="right" if right else "left", no_wrap=column != "what", overflow="fold"
        )
    parents = {span["span"]: span["parent"] for span in spans}
    start, until = spans[0]["start_ns"], spans[0]["start_ns"]
    for span in spans:
        depth, above = 0, span["parent"]
        while above in parents and depth < 9:
            depth, above = depth + 1, parents[above]
        if (waited := (span["start_ns"] - until) / 1e9) >= WAIT_S:
            at = (until - start) / 1e9
            table.add_row(f"{at:.3f}", f"{waited:.3f}", "", "waits", style="dim")
        until = max(until, span["end_ns"])
        facts = ", ".join(f"{k} {v}" for k, v in span["attributes"].items() if k != "uid")
        table.add_row(
            f"{(span['start_ns'] - start) / 1e9:.3f}",
            f"{(span['end_ns'] - span['start_ns']) / 1e9:.3f}",
            span["service"],
            Text(f"{'  ' * max(0, depth - 1)}{span['name']}  ").append(facts, style="dim"),
        )
    return table

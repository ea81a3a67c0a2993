"""`meshrl trace`: one row from prompt to gradient, from the spans that the services have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from meshrl.cli.find_mesh import say_which
from meshrl.cli.options import RUN, json_option
from meshrl.common.plain_text import say_json
from meshrl.contract.errors import NotFoundError, UserError
from meshrl.contract.types import Uid
from meshrl.http.view.spans import SpanFiles
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook, newest_run_dir
from meshrl.launcher.text_console import text_console

WAIT_S = 0.05
"""Shorter gaps between the services are not worth a line."""


@click.command()
@click.argument("uid")
@click.option(
    "--run-dir", type=RUN, envvar="MESHRL_RUN_DIR", help="The newest run here if not given."
)
@json_option
def trace(uid: str, run_dir: Path | None, as_json: bool) -> None:
    """Show what happened to the row UID (run/task/index.attempt; the run may be left out), and how long it took.

    Rows are traced with run.trace=SHARE, by group: all attempts of a row together.
    """
    directory = run_dir if run_dir is not None else newest_run_dir()
    run = AddressBook.load(directory / ADDRESS_BOOK_NAME).run
    say_which(directory, run)
    row = _parsed(uid, run)
    files = SpanFiles(directory)
    spans = files.row(row)
    if not spans:
        raise NotFoundError(files.problem or f"row {row} was not traced (run.trace)")
    if as_json:
        for span in spans:
            say_json(json.dumps(span))
        return
    text_console().print(_table(spans))


def _parsed(uid: str, run: str) -> Uid:
    for text in (uid, f"{run}/{uid}"):
        try:
            found = Uid.parse(text)
        except ValueError:
            continue
        if found.run == run:
            return found
    raise UserError(f"{uid!r} is no row of run {run}: want {run}/task/index.attempt")


def _table(spans: list[dict[str, Any]]) -> Table:
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

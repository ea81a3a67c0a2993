"""`meshrl reward`: submit, show, roll back, try and compare the reward functions of a running mesh."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.table import Table

from meshrl.cli.find_mesh import find_mesh
from meshrl.cli.options import PATH, Finite, NamedRun, RunGroup, json_option, names_run
from meshrl.common.plain_text import counted, harmless, one_line, say, say_json
from meshrl.contract.errors import UserError
from meshrl.contract.ports import Queue
from meshrl.contract.types import Json, Sample, Uid
from meshrl.launcher.text_console import text_console
from meshrl.rewardd.pool.signatures import FunctionKind
from meshrl.rewardd.registry.types import Case, Submission
from meshrl.rpc.exit_codes import Exit

Answer = TypeVar("Answer")
RESCORE_ROWS = 2048
"""Rows of a file in one request."""


@click.group(cls=RunGroup)
@names_run(word=False)
@click.option(
    "--reward",
    "address",
    metavar="HOST:PORT",
    envvar="MESHRL_REWARD",
    help="Address of the reward service; its token, if it needs one, is read from MESHRL_TOKEN.",
)
@click.pass_context
def reward(context: click.Context, named: NamedRun, address: str | None) -> None:
    """Submit reward functions to the running mesh of RUN (the newest one here), and choose which one scores."""
    context.obj = (named, address)


def _ask(context: click.Context, question: Callable[[Any], Awaitable[Answer]]) -> Answer:
    """Ask the registry one question."""
    # Imported here, because it imports gRPC, which `--help` does not need.
    from meshrl.cli.find_mesh import reward_address
    from meshrl.rpc.clients.operators import RewardRegistryClient

    async def ask() -> Answer:
        async with RewardRegistryClient(reward_address(*context.obj)) as client:
            return await question(client)

    return asyncio.run(ask())


@reward.command()
@click.argument("file", type=PATH)
@click.option("--name", help="The name that will point to it; the file's name if not given.")
@click.option(
    "--entry-point", default="", help="A function of the file; of a wheel module:function."
)
@click.option(
    "--kind",
    type=click.Choice([k.value for k in FunctionKind]),
    default=FunctionKind.COMPUTE_SCORE.value,
    show_default=True,
    help="How it is called (docs/how-to/submit-rewards.md).",
)
@click.option("--deps", default="", help="Packages that it imports, separated by commas.")
@click.option("--tests", type=PATH, help="JSON lines: solution, score, ground_truth ...")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    help="A lower limit than reward.limits: deadline_s=2, memory_bytes=5e8.",
)
@click.option("--note", default="", help="A note in the history.")
@click.option("--hold", is_flag=True, help="Store it without pointing the name to it.")
@click.pass_context
def submit(context: click.Context, /, file: Path, name: str | None, **options: Any) -> None:
    """Submit FILE, Python source or a wheel. The run uses it if the run follows that name."""
    data = _bytes(file)
    packed = file.suffix == ".whl"
    submission = Submission(
        name=name or file.stem.lower(),
        source="" if packed else _decoded(file, data),
        wheel=data if packed else b"",
        entry_point=options["entry_point"],
        kind=FunctionKind(options["kind"]),
        deps=tuple(dep.strip() for dep in options["deps"].split(",") if dep.strip()),
        cases=tuple(_cases(options["tests"])) if options["tests"] else (),
        limits=dict(map(_limit, options["limits"])),
        note=options["note"],
        point=not options["hold"],
    )
    done = _ask(context, lambda client: client.submit(submission))
    state = (
        "points to it"
        if done.name.current == done.hash
        else f"points to {done.name.current or 'none'}"
    )
    known = "" if done.created else ", known before"
    say(f"{done.hash}  {submission.name} {state} ({counted(done.cases, 'test')} passed{known})")


@reward.command("list")
@json_option
@click.pass_context
def list_(context: click.Context, as_json: bool) -> None:
    """Every name, what it points to, and what scores the run."""
    found = _ask(context, lambda client: client.names())
    if as_json:
        from google.protobuf.json_format import MessageToDict

        say_json(json.dumps(MessageToDict(found, preserving_proto_field_name=True), indent=2))
        return
    table = Table()
    for column in ("name", "version", "versions", "last change"):
        table.add_column(column)
    for name in found.names:
        last = name.history[-1]
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.at))
        table.add_row(
            name.name, name.current, str(len(name.versions)), f"{last.action} by {last.by}, {when}"
        )
    text_console().print(table)
    of = "the recipe's own" if found.scoring == found.base else f"as {found.followed!r} says"
    say(f"scoring: {found.scoring} ({of})")
    if found.http_address:
        say(f"HTTP: {found.http_address} (pages: {found.http_address}/docs)")


@reward.command()
@click.argument("name")
@click.argument("version", default="")
@click.pass_context
def show(context: click.Context, name: str, version: str) -> None:
    """Print the source of NAME, or of one VERSION of it; what would command a terminal is shown by its number."""
    found = _ask(context, lambda client: client.get(name, version))
    if found.is_wheel:
        say(f"# a wheel of {len(found.content)} bytes, entry point {found.entry_point}")
    else:
        say(found.content.decode().removesuffix("\n"), lines=True)


@reward.command()
@click.argument("name")
@click.argument("old")
@click.argument("new", default="")
@click.pass_context
def diff(context: click.Context, name: str, old: str, new: str) -> None:
    """Print the changes from version OLD to NEW, or to the current one."""
    text: str = _ask(context, lambda client: client.diff(name, old, new))
    say(text.removesuffix("\n"), lines=True)


@reward.command()
@click.argument("name")
@click.argument("version", default="")
@click.pass_context
def rollback(context: click.Context, name: str, version: str) -> None:
    """Point NAME to VERSION, or to the one before the current one; `recipe` goes back to the recipe's functions."""
    found = _ask(context, lambda client: client.roll_back(name, version))
    say(f"{name} points to {found.current or 'the functions of the recipe'}")


@reward.command()
@click.argument("name")
@click.argument("version")
@click.pass_context
def retire(context: click.Context, name: str, version: str) -> None:
    """Forbid VERSION to score as NAME."""
    _ask(context, lambda client: client.retire(name, version))
    say(f"{name}: {version} is retired")


@reward.command("test")
@click.argument("name")
@click.option("--solution", required=True, help="The response.")
@click.option(
    "--truth", help="The ground truth as text, which most data sets have: 42 is no number."
)
@click.option(
    "--truth-json", metavar="JSON", help="A ground truth that is no text: a number, a list."
)
@click.option("--data-source", default="", help="As in the data; empty if not given.")
@click.option("--version", default="", help="The current one if not given.")
@json_option
@click.pass_context
def test_(context: click.Context, /, name: str, solution: str, **options: Any) -> None:
    """Score one solution with NAME; the score does not enter the run."""
    sample = Sample(
        uid=Uid("try", "sample", 0),
        data_source=options["data_source"],
        solution=solution,
        ground_truth=_truth(options["truth"], options["truth_json"]),
        extra_info={},
    )
    (score,) = _ask(context, lambda client: client.score(name, options["version"], [sample]))
    if options["as_json"]:
        shown = {
            "outcome": score.outcome,
            "score": score.score,
            "components": dict(score.components),
        }
        say_json(json.dumps({**shown, "reason": score.reason, "hash": score.reward_hash}))
    elif score.outcome.trainable:
        parts = ", ".join(f"{key} {value:g}" for key, value in score.components.items())
        say(f"{score.score:g}  ({parts}; version {score.reward_hash})")
    else:
        say(f"{score.outcome}: {score.reason}", err=True)
    sys.exit(Exit.DONE if score.outcome.trainable else Exit.FAILED)


@reward.command()
@click.argument("name")
@click.argument("a")
@click.argument("b", default="")
@click.option("--samples", type=PATH, help="JSON lines: solution, ground_truth ...")
@click.pass_context
def compare(context: click.Context, name: str, a: str, b: str, samples: Path | None) -> None:
    """Versions A and B (or the current one) on the rows of a file, or on those that the run scored last.

    `recipe` stands for the functions of the recipe.
    """
    chosen = [sample for _, sample in _samples(samples)] if samples else []
    _print_differences(_ask(context, lambda client: client.compare(name, a, b, chosen)))


@reward.command()
@click.argument("name")
@click.argument("rows", type=PATH)
@click.option("--version", default="", help="The current one if not given.")
@click.option("--out", type=PATH, required=True, help="File for the rows with their new scores.")
@click.pass_context
def rescore(context: click.Context, name: str, rows: Path, version: str, out: Path) -> None:
    """Score stored ROWS (JSON lines: solution, ground_truth ...) again; prints progress and rate."""
    numbered = list(_samples(rows))
    began = time.monotonic()

    async def all_of_it(client: Any) -> tuple[int, int]:
        done = faults = 0
        draft = out.with_name(f".{out.name}.writing")
        with draft.open("w") as file:
            for start in range(0, len(numbered), RESCORE_ROWS):
                part = numbered[start : start + RESCORE_ROWS]
                scores = await client.score(name, version, [sample for _, sample in part])
                for (row, _), score in zip(part, scores, strict=True):
                    faults += not score.outcome.trainable
                    file.write(json.dumps({**row, **_scored(score)}) + "\n")
                done += len(part)
                rate = done / (time.monotonic() - began)
                say(f"{done} of {counted(len(numbered), 'row')}, {rate:.0f} rows/s", err=True)
        draft.replace(out)
        return done, faults

    done, faults = _ask(context, all_of_it)
    say(f"{counted(done, 'row')} scored again, {faults} without a score: {out}")


@reward.command()
@click.argument("name")
@click.option("--roles", default="read", show_default=True, help="Some of submit, read, operate.")
def token(name: str, roles: str) -> None:
    """Make a token for NAME: the token on stderr, its line for reward.registry.tokens on stdout."""
    from meshrl.rpc.credentials import new_token
    from meshrl.rpc.identity import TOKENS

    chosen = [role.strip() for role in roles.split(",")]
    unknown = [role for role in chosen if role not in TOKENS]
    if unknown:
        raise UserError(f"no role {unknown[0]!r}; there are {', '.join(TOKENS)}")
    token, digest = new_token()
    say(f"the token, shown this once: {token}", err=True)
    say(f"  - {{name: {json.dumps(name)}, roles: [{', '.join(chosen)}], sha256: {digest}}}")


def _scored(score: Any) -> dict[str, Json]:
    if not score.outcome.trainable:
        return {"score": None, "outcome": score.outcome, "reason": score.reason}
    return {"score": score.score, "outcome": score.outcome, "reward_hash": score.reward_hash}


def _print_differences(differences: Any) -> None:
    say(
        f"{differences.a} -> {differences.b}: {differences.compared} of"
        f" {counted(differences.rows, 'row')} scored by both"
    )
    say(f"  equal {differences.equal}, mean {differences.mean_a:.4g} -> {differences.mean_b:.4g}")
    if differences.faults_a or differences.faults_b:
        say(f"  no score: {differences.faults_a} -> {differences.faults_b}")
    for one in differences.largest:
        say(f"  {harmless(one.uid)}: {one.a:g} -> {one.b:g}  {one_line(one.text)}")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise UserError(f"--limit {text!r}: want NAME=NUMBER") from error


def _truth(text: str | None, as_json: str | None) -> Json:
    if as_json is None:
        return text
    if text is not None:
        raise UserError("--truth and --truth-json are two ground truths: give one")
    try:
        truth: Json = json.loads(as_json)
    except ValueError as error:
        raise UserError(f"--truth-json: {as_json!r} is not JSON: {error}") from error
    return truth


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Json]]]:
    """Raises UserError with file and line."""
    for number, line in enumerate(_decoded(path, _bytes(path)).splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get("solution"), str):
                raise UserError(f"{path}:{number}: want an object with a `solution`, text")
            yield number, row


def _cases(path: Path) -> Iterator[Case]:
    for number, row in _lines(path):
        try:
            yield Case(**{**row, "score": float(row["score"])})
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"{path}:{number}: not a test: {error}") from error


def _samples(path: Path) -> Sequence[tuple[dict[str, Json], Sample]]:
    return [
        (
            row,
            Sample(
                uid=Uid("stored", path.name.replace("/", "_"), number),
                data_source=str(row.get("data_source", "")),
                solution=row["solution"],
                ground_truth=row.get("ground_truth"),
                extra_info=row.get("extra_info") or {},
            ),
        )
        for number, row in _lines(path)
    ]


TELL_EVERY_S: Final = 1.0
RETRY_S: Final = 30.0
"""Seconds without a scored row after which the command stops waiting; the rows stay scheduled."""
STAGE: Final = "reward"


@reward.command("rescore-run")
@click.option("--queue", metavar="HOST:PORT", envvar="MESHRL_QUEUE", help="Needs --run.")
@click.option("--run", metavar="NAME", envvar="MESHRL_RUN", help="The run's name.")
@click.option(
    "--patience",
    type=Finite(min=0),
    default=RETRY_S,
    show_default=True,
    help="Seconds without progress after which to stop watching.",
)
@click.pass_context
def rescore_run(
    context: click.Context, queue: str | None, run: str | None, patience: float
) -> None:
    """Have the run's resident rows that are in no batch scored again; prints progress and rate."""
    named: NamedRun = context.obj[0]
    mesh = find_mesh(replace(named, queue=queue, name=run))
    left = mesh.ask_queue(lambda asked: _rescore(asked, mesh.run, patience))
    if left:
        say(
            f"{counted(left, 'row')} still to be scored, none was in {patience:g} s: left in the queue"
            " (meshrl why-waiting says for what)",
            err=True,
        )
    sys.exit(Exit.FAILED if left else Exit.DONE)


async def _rescore(queue: Queue, run: str, patience: float) -> int:
    """Rows not yet scored after `patience_s` without progress."""
    pending = await _pending(queue, run)  # rows that waited before: do not wait for them
    total = await queue.redo(run, STAGE, ())
    began = moved = time.monotonic()
    left = total
    while left:
        await asyncio.sleep(TELL_EVERY_S)
        now, waiting = time.monotonic(), max(0, await _pending(queue, run) - pending)
        if waiting < left:
            left, moved = waiting, now
        done = total - left
        say(f"{done} of {counted(total, 'row')}, {done / (now - began):.0f} rows/s", err=True)
        if now - moved > patience:
            return left
    say(f"{counted(total, 'row')} scored again in {time.monotonic() - began:.1f} s")
    return 0


async def _pending(queue: Queue, run: str) -> int:
    """Number of answered rows that lack a column."""
    return (await queue.ledger(run)).resident["pending"]

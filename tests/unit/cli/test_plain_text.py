"""Text of models, submitters and files, on terminals and in logs."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from rich.table import Table
from rich.text import Text

import meshrl.cli
from meshrl.cli import data
from meshrl.cli.commands import queue, reward, rows
from meshrl.cli.commands.queue import tell_audit
from meshrl.cli.find_mesh import say_which
from meshrl.cli.options import Finite
from meshrl.cli.root import report
from meshrl.common.plain_text import (
    LogFormatter,
    fit_terminal,
    harmless,
    harmless_faults,
    one_line,
    say,
    say_error,
    say_json,
)
from meshrl.contract.errors import UserError
from meshrl.contract.types import DeadLetter, Ledger, Outcome, Uid, Waiting
from meshrl.launcher.text_console import MergedLog, text_console
from meshrl.rpc import runtime


def test_what_looks_like_a_style_or_a_picture_is_shown_as_it_is() -> None:
    texts = ["[low, high]: 95 %", "[/sums]", "[bold]", ":smile:"]
    table = Table(title=texts[0], caption=texts[1])
    table.add_column()
    for text in texts:
        table.add_row(text)
    said = io.StringIO()
    console = text_console(said, width=80)
    console.print(table)
    console.print("[/end]")
    assert [said.getvalue().count(text) for text in [*texts, "[/end]"]] == [2, 2, 1, 1, 1]


@pytest.mark.parametrize("given", ["nan", "inf", "-inf", "one", "-1"])
def test_a_number_of_the_command_line_is_finite_and_in_its_range(given: str) -> None:
    with pytest.raises(click.BadParameter):
        Finite(min=0).convert(given, None, None)


FORGED = "12:00:00 ERROR meshrl.forged: all is lost"
NASTY = {
    "clears the screen": "a\x1b[2Jb",
    "names the window": "a\x1b]0;owned\x07b",
    "is a link": "a\x1b]8;;http://evil\x1b\\\\b",
    "C1": "a\x9b31mb",
    "C1 of a window": "a\x9d0;owned\x9cb",
    "bell and backspace": "a\x07\x08\x08b",
    "carriage return": "a\rb",
    "another line": f"a\n{FORGED}",
    "lines of Unicode": f"a\u2028{FORGED}\x85{FORGED}\x0b{FORGED}\x0c{FORGED}",
    "turned around": "a\u202eb\u2066c",
    "lone surrogate": "a\ud800b\udcff",
    "markup": "[bold]a[/bold] [link=http://evil]b[/link] [/] :smile:",
    "delete": "a\x7fb",
}
"""Hostile texts from a model, a submitter or a file."""
SHOWN = {
    "clears the screen": "a\\x1b[2Jb",
    "C1": "a\\x9b31mb",
    "turned around": "a\\u202eb\\u2066c",
}


def logged(text: str) -> None:
    """A record, with a traceback whose message says it."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    )
    try:
        raise ValueError(text)
    except ValueError as error:
        fault = (type(error), error, error.__traceback__)
    handler.handle(
        logging.LogRecord("meshrl", 30, "f", 1, "it said %s", (text,), fault, sinfo=text)
    )


def merged(text: str, directory: Path) -> None:
    """A line of a service, as `up` shows and saves it."""
    with MergedLog(directory / "logs", ["queue"], text_console(width=200)) as log:
        for line in text.split("\n"):
            log("queue", line)
    say((directory / "logs" / "queue.log").read_text(), lines=True)
    assert all(map(is_harmless, (directory / "logs" / "queue.log").read_text().split("\n")))


def a_row(text: str) -> dict[str, Any]:
    """A logged row that says it everywhere."""
    texts = dict.fromkeys(
        ("uid", "task", "prompt", "response", "worker", "data_source", "ground_truth"), text
    )
    return {
        **texts, "extra_info": text, "outcome": text, "split": text, "step": 1, "index": 0, "attempt": 0,
        "reward": 1.0, "advantage": 0.5, "mismatch": 0.0, "staleness": 0, "length": 1, "prompt_length": 1,
        "reward_components": {text: 1.0}, "reward_texts": {text: text}, "spans": [], "turns": 1, "media": [],
        "parts": [{"sampled": True, "text": text}], "tools": [], "times": {}, "pictures": [],
    }  # fmt: skip


def letter(text: str) -> DeadLetter:
    """A row that was given up."""
    uid = Uid(text, text, 0)
    return DeadLetter(
        uid=uid, stage=text, outcome=Outcome.INFRA_FAULT, reason=text, attempts=1, prompt=text
    )


def a_ledger(text: str) -> Ledger:
    """A run's counts."""
    each = {text: 1}
    return Ledger(
        run=text,
        admitted=4,
        trained=0,
        filtered=each,
        stale=each,
        dead_lettered=each,
        resident=each,
    )


def span(text: str) -> dict[str, Any]:
    """A piece of a row's way."""
    times = {"start_ns": 0, "end_ns": 10**9}
    return {
        "span": "a",
        "parent": "",
        "name": text,
        "service": text,
        "attributes": {text: text},
        **times,
    }


def differences(text: str) -> Any:
    """Two versions of a reward, compared."""
    one = SimpleNamespace(uid=text, a=0.0, b=1.0, text=text)
    counts = dict.fromkeys(
        ("compared", "rows", "equal", "mean_a", "mean_b", "faults_a", "faults_b"), 1
    )
    return SimpleNamespace(a=text, b=text, largest=[one], **counts)


def table(*cells: Any) -> Table:
    """A table of rich, with its title and caption."""
    made = Table(title=cells[0], caption=cells[0])
    made.add_column(cells[0])
    made.add_row(*cells[:1])
    made.add_row(Text(cells[0]))
    return made


Printer = Callable[[str, Path], object]
shown = {"where": "f:1", "tokens": 1, "pictures": [], "ground_truth": None}
PRINTERS: dict[str, Printer] = {
    "say": lambda text, _: say(text),
    "say on stderr": lambda text, _: say(text, err=True),
    "error": lambda text, _: say_error(text),
    "JSON": lambda text, _: say_json(json.dumps({text: text}, ensure_ascii=False, indent=2)),
    "one line": lambda text, _: say(one_line(text)),
    "a service's log": lambda text, _: logged(text),
    "the log of up": merged,
    "the end of a command": lambda text, _: report(UserError(text)),
    "the end of a service": lambda text, _: runtime._report(UserError(text)),
    "dead-letters": lambda text, _: text_console(width=200).print(
        queue._letters_table([letter(text)])
    ),
    "why-waiting": lambda text, _: text_console(width=200).print(
        queue._waits_table(
            [Waiting(who=text, what=text, since_s=1.0, owners=(text,), uids=(Uid(text, text, 0),))]
        )
    ),
    "ledger": lambda text, _: text_console(width=200).print(queue._ledger_table(a_ledger(text))),
    "trace": lambda text, _: text_console(width=200).print(rows._spans_table([span(text)])),
    "rows": lambda text, _: rows._print_list(text_console(width=200), [a_row(text)], ranked=False),
    "rows, ranked": lambda text, _: rows._print_list(
        text_console(width=200), [a_row(text)], ranked=True
    ),
    "reward compare": lambda text, _: reward._print_differences(differences(text)),
    "data show": lambda text, _: say(
        data._shown({**shown, "data_source": text, "text": text, "extra_info": {text: text}}),
        lines=True,
    ),
    "queue verify": lambda text, _: tell_audit(
        SimpleNamespace(problems=[text], ledgers={}, records=0, values=0, nbytes=0)
    ),
    "which run": lambda text, directory: say_which(directory, text),
    "a table": lambda text, _: text_console(width=200).print(table(text)),
    "a text": lambda text, _: text_console(width=200).print(text, Text(text)),
    "a rule": lambda text, _: text_console(width=200).rule(text),
}


def is_harmless(line: str) -> bool:
    return line.replace("\t", "").isprintable()


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
@pytest.mark.parametrize("printer", PRINTERS.values(), ids=PRINTERS.keys())
def test_no_printer_lets_a_text_command_the_terminal_or_forge_a_line(
    printer: Printer, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printer(text, tmp_path)
    captured = capsys.readouterr()
    lines = f"{captured.out}{captured.err}".split("\n")
    assert any(lines) and all(map(is_harmless, lines)), lines
    assert not [line for line in lines if line.startswith(FORGED)] or printer in SEVERAL_LINES
    if text == NASTY["markup"]:
        assert "[bold]" in captured.out + captured.err


SEVERAL_LINES = [PRINTERS[name] for name in ("data show", "a text", "the log of up")]
"""Printers that keep the lines of a text."""


def test_json_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = {text: [text, "\U0001f600\U000e0001 é　"] for text in NASTY.values()}
    for indent in (None, 2):
        for ascii_only in (True, False):
            say_json(json.dumps(value, ensure_ascii=ascii_only, indent=indent))
            out = capsys.readouterr().out
            assert json.loads(out) == value and all(
                map(is_harmless, out.replace("\u3000", "").split("\n"))
            )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\x1b[2J\x9b\x7f\r\n\tb", "a\\x1b[2J\\x9b\\x7f\\r\\n\\tb"),
        ("\u202e\u2028\ud800\ufeff\U000e0001", "\\u202e\\u2028\\ud800\\ufeff\\U000e0001"),
        ("né 漢字　[bold] \U0001f600", "né 漢字　[bold] \U0001f600"),
    ],
)
def test_what_is_no_mark_on_the_screen_is_shown_by_its_number(text: str, said: str) -> None:
    assert harmless(text) == said
    assert harmless(said) == said
    assert harmless("a\n\tb\r", lines=True) == "a\n\tb\\r"


def test_a_traceback_is_indented_under_its_record(capsys: pytest.CaptureFixture[str]) -> None:
    logged(f"a\n{FORGED}")
    first, *below = capsys.readouterr().err.splitlines()
    assert first.endswith(f"WARNING meshrl: it said a\\n{FORGED}")
    assert below[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in below) and f"  {FORGED}" in below


PLACES = {
    "common/meshrl/common/plain_text.py": {"print", "Formatter"},
    "services/meshrl/launcher/text_console.py": {"Console"},
    # Processes of their own that answer their parent, on pipes.
    "rewardd/meshrl/sandbox/commands.py": {"print"},
    "rewardd/meshrl/sandbox/program.py": {"print"},
    "trainer/meshrl/trainer/data/reasoning_gym.py": {"write"},
    "rollout/meshrl/rollout/agents/verifiers_server.py": {"print"},
    "rollout/meshrl/rollout/containers/enter.py": {"print"},
    "common/meshrl/common/process_guard.py": {"print"},
    # The one place where a service's log begins.
    "services/meshrl/cli/commands/serve.py": {"basicConfig", "StreamHandler"},
}
"""Modules that may print, and how."""
PRINTING = {
    "print",
    "echo",
    "secho",
    "Console",
    "Formatter",
    "basicConfig",
    "StreamHandler",
    "from_markup",
}


def prints(source: str) -> Iterator[tuple[str, int]]:
    """The calls by which something is printed."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        of_console = called.endswith(".print")
        if (name in PRINTING and not of_console) or called in (
            "sys.stdout.write",
            "sys.stderr.write",
        ):
            yield name, node.lineno


def test_what_prints_goes_through_the_one_place() -> None:
    root = Path(meshrl.cli.__file__).parents[3]
    found = []
    for room in ("common", "proto", "services", "rewardd", "rollout", "trainer", "transferqueue"):
        for path in (root / room / "meshrl").rglob("*.py"):
            place = str(path.relative_to(root))
            if "/testing/" in place:
                continue
            found += [
                f"{place}:{line}: {name}: use say, say_json or text_console, that what it prints is harmless"
                for name, line in prints(path.read_text())
                if name not in PLACES.get(place, ())
            ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
def test_a_fault_that_nobody_caught_is_printed_harmlessly(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", None)
    monkeypatch.setattr(threading, "excepthook", None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler())
    harmless_faults()
    error = ValueError(text)
    error.add_note(text)
    sys.excepthook(ValueError, error, None)
    threading.excepthook(threading.ExceptHookArgs((ValueError, error, None, None)))
    assert logging.lastResort is not None
    logging.lastResort.handle(logging.LogRecord("meshrl", 30, "f", 1, "%s", (text,), None))
    lines = capsys.readouterr().err.split("\n")
    assert all(map(is_harmless, lines)) and len(lines) > 5
    assert not [line for line in lines if line.startswith(FORGED)]


PRINTERS: dict[str, Callable[[str], None]] = {
    "a line": say,
    "lines": lambda text: say(f"{text}\n{text}", lines=True),
    "an error": lambda text: say_error(UserError(text)),
    "JSON": lambda text: say_json(json.dumps({"said": text}, ensure_ascii=False)),
    "a table": lambda text: text_console().print(_table_of(text)),
    "a rule": lambda text: text_console().rule(Text(text)),
    "a log": lambda text: logging.getLogger("printers").warning("%s", text),
    "a command that is wrong": lambda text: meshrl.cli.main([text]),
    "the log of services": lambda text: MergedLog(Path(), ["a"], text_console())._show("a", text),
}


def _table_of(text: str) -> Table:
    table = Table(title=text)
    table.add_row(text)
    return table


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252", "gb2312", "utf-8"])
@pytest.mark.parametrize("told", [False, True])
def test_every_printer_prints_what_the_terminal_has_and_what_is_near_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str, told: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    # What pytest captures of the log would go between its processes, which know no half of a surrogate pair.
    monkeypatch.setattr(logging.getLogger("printers"), "propagate", False)
    text = "é │ → ▁█ … 二加三 😀 \udce9"
    if told:
        monkeypatch.setenv("MESHRL_TERMINAL", encoding)
    for name, prints in PRINTERS.items():
        said = io.BytesIO()
        first = "utf-8" if told else encoding
        stream = io.TextIOWrapper(said, encoding=first, write_through=True)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        if told:
            monkeypatch.setenv("MESHRL_TERMINAL", encoding)
        fit_terminal()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(LogFormatter())
        logging.getLogger("printers").addHandler(handler)
        try:
            prints(text)
        except SystemExit as error:
            assert error.code == 2, name
        finally:
            logging.getLogger("printers").removeHandler(handler)
        shown = said.getvalue().decode(encoding)
        if name == "JSON":
            assert json.loads(shown) == {"said": text}
        elif encoding in ("latin-1", "ascii"):
            assert "| > _# ... ??? ?" in shown, (name, shown)
        else:
            assert "│" in shown or "|" in shown, (name, shown)

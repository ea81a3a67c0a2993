"""Text of models, submitters and files made harmless: it commands no terminal and ends no line of a log."""

from __future__ import annotations

import codecs
import io
import json
import logging
import math
import os
import re
import sys
import threading
import time
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from meshrl.common.python_process import TERMINAL

MOST = 500
"""Characters of a text that is shown on one line."""
NEAR = "meshrl-near"
"""How what an encoding lacks is printed: by what comes near it."""
NEAREST = dict(zip("│─·•→▁▂▃▄▅▆▇█–—×≤≥", "|-.*>_.,-=+*#--x<>", strict=True)) | {"…": "..."}
OWN = re.compile(r"'[^']*'|\"[^\"]*\"|[0-9]+")
"""Parts of a line that are of the row or the moment alone."""
TELL_AGAIN_S = 30.0
MOST_ALIKE = 16
MOST_LINES = 1024
"""Lines that are remembered."""


def harmless(text: str, *, lines: bool = False) -> str:
    """The text with escapes, controls, marks that turn its direction and line breaks shown by their numbers.

    With `lines` it may have several lines.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if _is_shown(c) or c in kept else ascii(c)[1:-1] for c in text)


def _is_shown(character: str) -> bool:
    """Whether it is a mark on the screen, or the space of some script."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


def one_line(text: str) -> str:
    """The beginning of a text, without line breaks."""
    return harmless(" ".join(text[:MOST].split()))


def say(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print one line whatever is in it, or with `lines` several; on stderr with `err`."""
    print(harmless(text, lines=lines), file=sys.stderr if err else sys.stdout, flush=True)


def say_error(error: object) -> None:
    """Print what went wrong on stderr, one line per problem."""
    for line in str(error).splitlines():
        say(f"error: {line}", err=True)


def say_json(text: str, *, err: bool = False) -> None:
    """Print JSON, which stays JSON: a character that would command a terminal is written as its escape."""
    stream = sys.stderr if err else sys.stdout
    if not text.isprintable():
        # The line breaks are those of the indent; the ones of texts are escapes already.
        text = "".join(c if _is_shown(c) or c == "\n" else _json_escape(c) for c in text)
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        text = "".join(c if c.isascii() else _json_escape(c) for c in text)
    print(text, file=stream, flush=True)


def _json_escape(character: str) -> str:
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def fit_terminal() -> None:
    """Let this process print what its terminal's encoding has, and what comes near it where it lacks a character."""
    codecs.register_error(NEAR, _near)
    told = os.environ.pop(TERMINAL, None)
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        encoding = codecs.lookup(told or stream.encoding).name
        if encoding != "utf-8":
            stream.reconfigure(encoding=encoding, errors=NEAR)


def _near(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return NEAREST.get(error.object[error.start], "?"), error.start + 1


class LogFormatter(logging.Formatter):
    """A line for a record, harmless; the lines of a traceback are indented, so that none passes for a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line."""
        return harmless(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Several lines."""
        return _below(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """Several lines."""
        return _below(super().formatStack(stack_info))


class RepeatedLines(logging.Filter):
    """Keeps a warning that comes again and again to its first line; the tenth, hundredth … and a later one count.

    Whatever fails every row writes the same line for each. Lines are the same that differ in numbers and in quoted
    text alone; of those that differ more but come from one place in the code MOST_ALIKE are logged.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._told: OrderedDict[tuple[str, str], tuple[float, int, int]] = OrderedDict()
        """When a line was told last, how many of it there were, and how many since then; the key has its logger."""
        self._alike: Counter[tuple[str, str]] = Counter()
        """Different lines of one place in the code: the key is the logger and the message without its values."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged; it says how many like it were dropped."""
        if record.levelno < logging.WARNING:
            return True
        text, place = record.getMessage(), (record.name, str(record.msg))
        line = record.name, OWN.sub("#", text[:MOST])
        if line not in self._told:
            if len(self._alike) > MOST_LINES:
                self._alike.clear()
            self._alike[place] += 1
        if self._alike[place] > MOST_ALIKE:
            line = place
        now = self._clock()
        before, count, hidden = self._told.get(line, (-math.inf, 0, 0))
        count += 1
        told = now - before >= TELL_AGAIN_S or (count > 1 and count == 10 ** (len(str(count)) - 1))
        self._told[line] = (now, count, 0) if told else (before, count, hidden + 1)
        self._told.move_to_end(line)
        if len(self._told) > MOST_LINES:
            self._told.popitem(last=False)
        if told and hidden:
            record.msg, record.args = (
                f"{text} ({counted(hidden, 'more line')} like this before)",
                (),
            )
        return told


def harmless_faults() -> None:
    """Let Python print as harmlessly what it prints by itself: uncaught faults, logs without a handler."""
    log = logging.getLogger("meshrl")

    def say_thread(fault: threading.ExceptHookArgs) -> None:
        if fault.exc_type is not SystemExit:
            log.critical("a thread ended by %r", fault.exc_value, exc_info=fault.exc_value)

    sys.excepthook = lambda *fault: log.critical("ended by %r", fault[1], exc_info=fault)
    threading.excepthook = say_thread
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter())


def _below(text: str) -> str:
    return "\n".join(f"  {line}" for line in harmless(text, lines=True).splitlines())


def counted(count: int, one: str, many: str = "") -> str:
    """`1 row`, `1,024 rows`; `many` where it is not `one` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def whole(text: str) -> str:
    """`text` with U+FFFD for each half of a surrogate pair, which is no character: it has no UTF-8 and no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

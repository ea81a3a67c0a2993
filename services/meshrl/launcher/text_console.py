"""The console of rich that tables, logs and rows are printed on, and the merged log of all services."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from meshrl.common.line_file import LineFile
from meshrl.common.plain_text import harmless


def text_console(
    file: IO[str] | None = None, width: int | None = None, *, soft_wrap: bool = False
) -> Console:
    """A console that shows texts as they are: `[low]` is no style, `:smile:` no picture, an escape no order."""
    return _HarmlessConsole(
        file=file, width=width, highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap
    )


class _HarmlessConsole(Console):
    """Rich writes the codes of its styles itself; what a text says is text."""

    def on_broken_pipe(self) -> None:
        """Print no more, and raise for the printing thread: rich would end the process."""
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, "the reader of the output has closed it")

    def render_str(self, text: str, **options: Any) -> Text:
        """A text by itself or in a cell, on one line; a `Text` may have several."""
        return super().render_str(harmless(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Whatever is printed, piece by piece."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else piece._replace(text=harmless(piece.text, lines=True))


COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
ERRORS = re.compile(
    r"\b(WARNING|ERROR|CRITICAL)\b|^(error|warning):|^ *Traceback|^ *\w*(Error|Exception):"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class MergedLog:
    """Takes (service, line); `up` has lines of its own.

    A file of `max_bytes` is moved aside, and the newest `keep` of those stay: `queue.log`, `queue.log.1`, ...
    """

    def __init__(
        self,
        directory: Path,
        names: Sequence[str],
        console: Console,
        *,
        max_bytes: int = 0,
        keep: int | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._console = console
        self._max_bytes = max_bytes
        self._keep = keep
        self._files: dict[str, LineFile] = {}
        self._refused = False
        self.on_lost: Callable[[], None] = lambda: None
        """Called once, when the output has no reader any more: `meshrl up | head`. It is still saved."""
        self._width = max(map(len, [*names, "up"]))
        self._colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}

    def __enter__(self) -> MergedLog:
        return self

    def __exit__(self, *raised: object) -> None:
        for file in self._files.values():
            file.close()

    def __call__(self, name: str, line: str) -> None:
        """Save and show one line. Colours of its own are left out, and what else it would do to a terminal."""
        line = harmless(_COLOUR.sub("", line), lines=True)
        self._save(name, line)
        self._show(name, line)

    def _save(self, name: str, line: str) -> None:
        if name not in self._files:
            path = self._directory / f"{name}.log"
            self._files[name] = LineFile(path, max_bytes=self._max_bytes, keep=self._keep)
        error = self._files[name].write_or_keep(line)
        if error is not None and not self._refused:
            # A full disk must not end the run: this is reported once, and the lines are still shown.
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full" if full else str(error)
            self._show("up", f"error: logs are shown but not saved: {self._directory}: {why}")
        self._refused = error is not None

    def _show(self, name: str, line: str) -> None:
        # A worker that was added later takes the next colour.
        colour = self._colour.setdefault(name, COLOURS[len(self._colour) % len(COLOURS)])
        style = "bold" if name == "up" else colour
        text = Text(f"{name:>{self._width}} │ ", style=style)
        text.append(line, style="" if not ERRORS.search(line) else "bold red")
        try:
            self._console.print(text, soft_wrap=True)
        except BrokenPipeError:
            self.on_lost()

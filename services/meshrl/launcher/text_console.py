"""The console of rich that tables, logs and rows are printed on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

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

    def render_str(self, text: str, **options: Any) -> Text:
        """A text by itself or in a cell, on one line; a `Text` may have several."""
        return super().render_str(harmless(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Whatever is printed, piece by piece."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else piece._replace(text=harmless(piece.text, lines=True))

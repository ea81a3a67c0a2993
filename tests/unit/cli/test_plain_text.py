from __future__ import annotations

import io

import click
import pytest
from rich.table import Table

from meshrl.cli.options import Finite
from meshrl.cli.plain_text import text_console


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

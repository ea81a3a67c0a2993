"""`meshrl trace` on a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Console

from meshrl.cli.commands.rows import _spans_table


def test_figures_are_whole_however_much_a_span_has_to_say() -> None:
    facts = {"turn": 0, "tokens": 54, "versions": "1.1, 1.2, 1.3", "finish_reason": "stop"}
    spans = [
        {"span": f"{at}", "parent": "", "name": "generate", "service": "rollout-0"}
        | {"start_ns": at * 10**9, "end_ns": at * 10**9 + 5 * 10**8, "attributes": facts}
        for at in range(2)
    ]
    console = Console(width=80)
    with console.capture() as said:
        console.print(_spans_table(spans))
    lines = said.get().splitlines()
    assert lines[0].split()[:4] == ["from", "s", "took", "s"]
    assert lines[1].split()[:3] == ["0.000", "0.500", "rollout-0"]
    assert max(map(len, lines)) <= 80

"""Draws curves: as SVG, which needs no library, and as braille dots on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from meshrl.common.files import replace_file
from meshrl.contract.errors import UserError

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 24, 22
"""Margins, for the labels of the axes."""
LEGEND = 13
"""Height of a line, where there are several curves."""
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")
TICKS = 4
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille sign: four rows of two dots."""
STYLES = ("blue", "red", "green", "yellow", "magenta", "cyan")


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line of a chart: values by step, none of them nan."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves with common axes."""

    title: str
    curves: Sequence[ChartLine]
    log: bool = False
    """Logarithmic values; those that are not positive are left out."""

    @property
    def shown(self) -> list[ChartLine]:
        """The curves that have a point to draw; with `log` their logarithms to base 10."""
        found = []
        for curve in self.curves:
            points = list(zip(curve.steps, curve.values, strict=True))
            if self.log:
                points = [(step, math.log10(value)) for step, value in points if value > 0]
            if points:
                steps, values = zip(*points, strict=True)
                found.append(ChartLine(curve.name, steps, values))
        return found

    def label(self, value: float, span: float) -> str:
        """The label of a tick, with as many digits as tell it from the next one."""
        if self.log:
            return f"{10**value:.3g}"
        if abs(value) < span / 1e6:
            return "0"
        if abs(value) >= 1000 and span >= 10:
            return f"{value:,.0f}"
        digits = max(3, math.ceil(math.log10(abs(value) / span)) + 3)
        return f"{value:.{min(digits, 12)}g}"


def svg(chart: Chart) -> str:
    """The chart as an SVG element; its text takes the color of what is around it."""
    curves = chart.shown
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' role="img" aria-label="{escape(chart.title)}" font-family="sans-serif" font-size="11"'
        ' fill="currentColor">',
        f'<text x="{LEFT}" y="14" font-size="12" font-weight="bold">{escape(chart.title)}</text>',
    ]
    if curves:
        (x0, x1), (y0, y1) = _range(c.steps for c in curves), _range(c.values for c in curves)
        top = TOP + LEGEND * (len(curves) - 1)
        across, up = WIDTH - LEFT - RIGHT, HEIGHT - top - BOTTOM

        def place(step: float, value: float) -> tuple[float, float]:
            x = LEFT + across * (step - x0) / (x1 - x0)
            return x, top + up * (1 - (value - y0) / (y1 - y0))

        for value in _ticks(y0, y1):
            y = place(x0, value)[1]
            parts.append(
                f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity=".15"/>'
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{chart.label(value, y1 - y0)}</text>'
            )
        for step in _ticks(x0, x1):
            x = place(step, y0)[0]
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{step:g}</text>')
        for at, curve in enumerate(curves):
            color = COLORS[at % len(COLORS)]
            points = [place(*point) for point in zip(curve.steps, curve.values, strict=True)]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>'
            )
            if len(points) <= 40:
                parts += [
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}"/>' for x, y in points
                ]
            if len(curves) > 1:
                parts.append(
                    f'<text x="{WIDTH - RIGHT}" y="{14 + LEGEND * at}" text-anchor="end" fill="{color}">'
                    f"{escape(curve.name)}</text>"
                )
    else:
        parts.append(f'<text x="{LEFT}" y="{HEIGHT / 2}">no figures</text>')
    return "".join([*parts, "</svg>"])


def save(charts: Sequence[Chart], path: Path) -> None:
    """Write charts as SVG, one under the other. Raises UserError for a path that does not end in `.svg`."""
    if path.suffix != ".svg":
        raise UserError(f"{path}: pictures are drawn as SVG; want a name that ends in .svg")
    inner = "".join(
        svg(chart).replace("<svg ", f'<svg y="{at * HEIGHT}" ', 1)
        for at, chart in enumerate(charts)
    )
    replace_file(
        path,
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{len(charts) * HEIGHT}"'
        f' color="#222"><rect width="100%" height="100%" fill="white"/>{inner}</svg>\n',
    )


def braille(chart: Chart, width: int, height: int) -> Iterator[list[tuple[str, str]]]:
    """The lines of a chart on a terminal, each as pieces of text with their style."""
    curves = chart.shown
    yield [(chart.title, "bold")]
    if not curves:
        yield [("no figures", "dim")]
        return
    (x0, x1), (y0, y1) = _range(c.steps for c in curves), _range(c.values for c in curves)
    labels = [chart.label(value, y1 - y0) for value in (y1, (y0 + y1) / 2, y0)]
    margin = max(map(len, labels)) + 1
    columns = max(1, width - margin)
    bits = [[0] * columns for _ in range(height)]
    styles = [[""] * columns for _ in range(height)]
    for at, curve in enumerate(curves):
        for x, y in _dots(curve, columns * 2, height * 4, (x0, x1), (y0, y1)):
            bits[y // 4][x // 2] |= DOTS[y % 4][x % 2]
            styles[y // 4][x // 2] = STYLES[at % len(STYLES)]
    for row in range(height):
        label = {0: labels[0], height // 2: labels[1], height - 1: labels[2]}.get(row, "")
        cells = zip(bits[row], styles[row], strict=True)
        yield [
            (f"{label:>{margin - 1}} ", "dim"),
            *((chr(0x2800 + bit) if bit else " ", style) for bit, style in cells),
        ]
    ends = f"{x0:g}", f"step {x1:g}"
    yield [(" " * margin + ends[0] + ends[1].rjust(max(0, columns - len(ends[0]))), "dim")]
    if len(curves) > 1:
        yield [(f"  {curve.name}", STYLES[at % len(STYLES)]) for at, curve in enumerate(curves)]


def _dots(
    curve: ChartLine, across: int, down: int, xs: tuple[float, float], ys: tuple[float, float]
) -> Iterator[tuple[int, int]]:
    """The dots of a curve, neighbours joined by lines."""
    points = [
        (
            round((across - 1) * (step - xs[0]) / (xs[1] - xs[0])),
            round((down - 1) * (1 - (value - ys[0]) / (ys[1] - ys[0]))),
        )
        for step, value in zip(curve.steps, curve.values, strict=True)
    ]
    yield points[0]
    for (ax, ay), (bx, by) in pairwise(points):
        count = max(abs(bx - ax), abs(by - ay), 1)
        for n in range(1, count + 1):
            yield round(ax + (bx - ax) * n / count), round(ay + (by - ay) * n / count)


def _range(parts: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Lowest and highest, apart even if all are equal."""
    every = [value for part in parts for value in part]
    low, high = min(every), max(every)
    room = 0.0 if high > low else abs(high) * 0.1 or 1.0
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two."""
    rough = (high - low) / TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]

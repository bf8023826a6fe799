"""Curves of time on two logarithmic axes, where growth in proportion is a straight line of slope one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from equipoise.report.markup import apart, colour, dashes, label, svg, tag, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460.0, 280.0, 52.0, 96.0, 14.0, 40.0
TITLE = 30.0  # height of the line above a drawing
COLUMNS = 2
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

Series = Mapping[str, Sequence[tuple[float, float]]]


def sheet(title: str, cases: Mapping[str, Mapping[str, Any]]) -> str:
    """The drawings of all cases as one image."""
    parts = [tag("style", files("equipoise.report").joinpath("page.css").read_text(encoding="utf-8"))]
    for number, (name, case) in enumerate(cases.items()):
        left, top = number % COLUMNS * WIDTH, number // COLUMNS * (HEIGHT + TITLE)
        parts.append(label(left + LEFT, top + 20, f"{name}: ms a round", font_weight=600))
        drawn = lines(case["series"], case["axis"])
        parts.append(tag("g", drawn, transform=f"translate({left:g} {top + TITLE:g})"))
    width, height = COLUMNS * WIDTH, math.ceil(len(cases) / COLUMNS) * (HEIGHT + TITLE)
    return tag(
        "svg",
        tag("title", text(title)),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        font_family=FONT,
    )


def lines(series: Series, axis: str) -> str:
    """A drawing of seconds, shown as milliseconds, over the points that were measured. The x axis has a tick at each
    point."""
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = decades([1000 * y for points in series.values() for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = _share(x, xs[0], xs[-1]), _share(y, ys[0], ys[-1])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = []
    for y in ys:
        at = place(xs[0], y)[1]
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(label(LEFT - 8, at + 4, f"{y:,g}", class_="tick", text_anchor="end"))
    for x in xs:
        parts.append(label(place(x, ys[0])[0], HEIGHT - BOTTOM + 18, short(x), class_="tick", text_anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(label(middle, HEIGHT - 4, axis, class_="tick", text_anchor="middle"))
    placed = [[place(x, 1000 * y) for x, y in points] for points in series.values()]
    names = apart([points[-1][1] for points in placed], 15, TOP, HEIGHT - BOTTOM)
    for index, (name, points, beside) in enumerate(zip(series, placed, names, strict=True)):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        line = tag("polyline", points=path, class_="line", stroke_dasharray=dashes(index))
        dots = [tag("circle", cx=x, cy=y, r=2.5, class_="dot") for x, y in points]
        parts.append(
            tag("g", line, *dots, label(WIDTH - RIGHT + 8, beside + 4, name, class_="name"), class_=colour(index))
        )
    return svg(WIDTH, HEIGHT, *parts, title=axis)


def decades(values: Sequence[float]) -> list[float]:
    """The powers of ten from just below the smallest value to just above the largest.

    >>> decades([3, 40])
    [1.0, 10.0, 100.0]
    """
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def short(value: float) -> str:
    """
    >>> short(0.3), short(1000.0), short(118282), short(1862666)
    ('0.3', '1k', '118k', '1.9M')
    """
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}" if value >= 10 * size else f"{value / size:.2g}{unit}"
    return f"{value:g}"


def _share(value: float, low: float, high: float) -> float:
    return (math.log(value) - math.log(low)) / max(math.log(high) - math.log(low), 1e-9)

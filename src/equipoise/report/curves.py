"""Draws a metric against rounds, with one line per run and its name at the end of the line."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.report.markup import apart, colour, dashes, hover, label, percent, shortened, svg, tag, ticks
from equipoise.report.reading import Run

WIDTH, HEIGHT = 560.0, 330.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, 156.0, 14.0, 40.0
LINE_POINTS, HOVER_POINTS = 1000, 120  # limits per line, so that the page of a long run stays small
NAMED = 18  # the number of names that fit one above the other

Points = list[tuple[int, float]]


def curves(runs: Sequence[Run], key: str, title: str) -> str:
    """Draw the metric `key` of all runs; a run that never measured it has no line."""
    series = {index: points for index, run in enumerate(runs) if (points := run.series(key))}
    if not series:
        return tag("p", "Not measured in any round.", class_="note")
    every = [point for points in series.values() for point in points]
    rounds = [at for at, _ in every]
    xs = ticks(min(rounds), max(rounds), 6, least_step=1)
    ys = ticks(min(value for _, value in every), max(value for _, value in every), 6, least_step=0.01)
    right = max(max(rounds), min(rounds) + 1)

    def x(at: float) -> float:
        return LEFT + (at - min(rounds)) / (right - min(rounds)) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in ys:
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_="grid"))
        digits = 0 if round(100 * value, 6).is_integer() else 1
        parts.append(label(LEFT - 8, y(value) + 4, percent(value, digits), class_="tick", text_anchor="end"))
    for at in xs:
        if min(rounds) <= at <= right:
            parts.append(label(x(at), HEIGHT - BOTTOM + 18, f"{at:.0f}", class_="tick", text_anchor="middle"))
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(label(middle, HEIGHT - 4, "round", class_="tick", text_anchor="middle"))
    for index, points in series.items():
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in _thinned(points, LINE_POINTS))
        line = tag("polyline", points=path, class_="line", stroke_dasharray=dashes(index))
        dots = [
            tag(
                "circle",
                hover(f"{runs[index].name}, round {at}: {percent(value)} %"),
                cx=x(at),
                cy=y(value),
                r=2.5,
                class_="dot" if len(points) <= 30 else "dot hidden",
            )
            for at, value in _thinned(points, HOVER_POINTS)
        ]
        parts.append(tag("g", line, *dots, class_=colour(index)))
    if len(series) <= NAMED:
        ends = [y(points[-1][1]) for points in series.values()]
        places = apart(ends, 15, TOP + 4, HEIGHT - BOTTOM)
        for (index, points), end, place in zip(series.items(), ends, places, strict=True):
            parts.append(_name(runs[index].name, index, x(points[-1][0]), end, place, points[-1][1]))
    return svg(WIDTH, HEIGHT, *parts, title=title)


def _name(name: str, index: int, x: float, end: float, place: float, value: float) -> str:
    """Write the run's last value and name in the right margin, and connect them with the end of its line."""
    edge = WIDTH - RIGHT + 12
    leader = tag("path", d=f"M{x + 3:.1f},{end:.1f} L{edge - 3:.1f},{place:.1f}", class_="leader")
    return tag(
        "g",
        leader,
        label(edge, place + 4, percent(value), class_="value"),
        label(edge + 32, place + 4, shortened(name, 16), hover(name), class_="name"),
        class_=colour(index),
    )


def _thinned(points: Points, most: int) -> Points:
    """Keep about `most` points: every n-th one, and the last."""
    stride = -(-len(points) // most)
    return points[:-1:stride] + points[-1:]

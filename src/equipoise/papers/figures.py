"""Draws curves against rounds as the papers do: one line per method, the mean over its seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files

from equipoise.papers.comparison import Block, Row
from equipoise.papers.experiment import Experiment
from equipoise.papers.measures import MEASURES
from equipoise.report.markup import apart, colour, dashes, label, shortened, svg, tag, text, ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520.0, 300.0, 44.0, 110.0, 14.0, 40.0
TITLE = 34.0  # height of the title above a row of drawings
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
DRAWN = {
    "minority_accuracy": "minority accuracy, %",
    "accuracy": "overall accuracy, %",
    "balanced_accuracy": "mean recall of the classes, %",
    "loss": "loss",
}

Series = Mapping[str, Sequence[tuple[float, float]]]


def lines(series: Series, axis: str, shaded: tuple[float, float] | None = None) -> str:
    """Draw curves over a common axis, each with its name at its end; `shaded` is a range of the axis."""
    every = [point for points in series.values() for point in points]
    x0, x1 = min(x for x, _ in every), max(x for x, _ in every)
    ys = ticks(0, max(y for _, y in every) or 1.0, 6)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x0) / max(x1 - x0, 1e-9) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - y / ys[-1] * (HEIGHT - TOP - BOTTOM)

    parts = []
    if shaded:
        (a, top), (b, bottom) = place(shaded[0], ys[-1]), place(shaded[1], 0)
        parts.append(tag("rect", x=a, y=top, width=b - a, height=bottom - top, class_="band"))
    for y in ys:
        (a, at), (b, _) = place(x0, y), place(x1, y)
        parts.append(tag("line", x1=a, x2=b, y1=at, y2=at, class_="grid"))
        parts.append(label(LEFT - 8, at + 4, f"{y:g}", class_="tick", text_anchor="end"))
    for x in ticks(x0, x1, 6, least_step=1):
        if x0 <= x <= x1:
            parts.append(label(place(x, 0)[0], HEIGHT - BOTTOM + 18, f"{x:g}", class_="tick", text_anchor="middle"))
    parts.append(label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, axis, class_="tick", text_anchor="middle"))
    last = [place(*points[-1]) for points in series.values()]
    names = apart([y for _, y in last], 15, TOP, HEIGHT - BOTTOM)
    for index, ((name, points), (x, y), beside) in enumerate(zip(series.items(), last, names, strict=True)):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        line = tag("polyline", points=path, class_="line", stroke_dasharray=dashes(index))
        leader = tag("path", d=f"M{x + 3:.1f},{y:.1f} L{WIDTH - RIGHT + 16:.1f},{beside:.1f}", class_="leader")
        named = label(WIDTH - RIGHT + 20, beside + 4, shortened(name, 14), class_="name")
        parts.append(tag("g", line, leader, named, class_=colour(index)))
    return svg(WIDTH, HEIGHT, *parts, title=axis)


def drawings(experiment: Experiment, one: Block) -> Iterator[tuple[str, str]]:
    """Yield a caption and a drawing for each curve that the experiment's measures need."""
    for key in dict.fromkeys(drawn for name in experiment.measures if (drawn := MEASURES[name].curve)):
        scale = 1 if key == "loss" else 100
        series = {row.method: points for row in one.rows if (points := _mean(row, key, scale))}
        if series:
            yield DRAWN[key], lines(series, "iteration" if experiment.kind == "estimate" else "round")


def _mean(row: Row, key: str, scale: float) -> list[tuple[float, float]]:
    """Return (round, mean) for every round, over the seeds that have a value in that round."""
    values: dict[float, list[float]] = {}
    for run in row.runs:
        curve = run.get("curve") or {}
        for at, value in zip(curve.get("round", ()), curve.get(key, ()), strict=False):
            if value is not None:
                values.setdefault(at, []).append(value)
    return [(at, scale * sum(found) / len(found)) for at, found in sorted(values.items())]


def sheet(experiment: Experiment, made: Sequence[Block]) -> str | None:
    """Draw all curves of an experiment in one image, one row per cell; None if there are no curves."""
    rows = [(one.title, list(drawings(experiment, one))) for one in made if one.has_runs]
    rows = [(title, drawn) for title, drawn in rows if drawn]
    if not rows:
        return None
    parts = [tag("style", files("equipoise.report").joinpath("page.css").read_text(encoding="utf-8"))]
    for number, (title, drawn) in enumerate(rows):
        top = number * (HEIGHT + TITLE)
        for column, (what, drawing) in enumerate(drawn):
            left = column * WIDTH
            parts.append(label(left + LEFT, top + 22, f"{title}: {what}", font_weight=600))
            parts.append(tag("g", drawing, transform=f"translate({left:g} {top + TITLE:g})"))
    width, height = WIDTH * max(len(drawn) for _, drawn in rows), (HEIGHT + TITLE) * len(rows)
    return tag(
        "svg",
        tag("title", text(f"{experiment.name}: {experiment.title}")),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        font_family=FONT,
    )

"""Draws the recall of each class: one row per class with its training count, one column of bars per run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from equipoise.report.markup import colour, hover, label, percent, shortened, svg, tag
from equipoise.report.reading import Run, number
from equipoise.runs import metrics

WIDTH = 1120.0
NAMES, COUNTS, GAP = 130.0, 130.0, 26.0
HEAD = 30.0
ABREAST = 4  # the most runs in one drawing; further runs get a drawing below

Numbered = tuple[int, Run]


def recalls(runs: Sequence[Run]) -> str:
    """Draw the recalls of all runs; runs of different federations get separate drawings."""
    charts = []
    for _, group in groupby(enumerate(runs), lambda pair: (pair[1].classes, pair[1].train_counts)):
        members = list(group)
        wide = -(-len(members) // -(-len(members) // ABREAST))  # as few drawings as possible, filled evenly
        charts += [_chart(members[i : i + wide]) for i in range(0, len(members), wide)]
    return "".join(charts)


def recall(run: Run) -> list[float | None]:
    """Return the last known recall of each class, computed from a confusion matrix if no record has it."""
    record = run.last("recall")
    if record is not None:
        values = [number(value) for value in record["recall"]]
    else:
        record = run.last("confusion")
        values = metrics.recall(record["confusion"]) if record is not None else []
    return (values + [None] * len(run.classes))[: len(run.classes)]


def _chart(members: list[Numbered]) -> str:
    first = members[0][1]
    row = 22.0 if len(first.classes) <= 26 else 16.0
    order = list(range(len(first.classes)))
    if first.train_counts:
        order.sort(key=lambda index: -first.train_counts[index])
    minority = {index for _, run in members for index in run.minority}
    height = HEAD + row * len(order) + 22
    left = NAMES + (COUNTS if first.train_counts else 0)
    column = (WIDTH - left) / max(len(members), 2)
    width = left + column * len(members)
    parts = [
        tag("rect", x=0, y=HEAD + place * row, width=width, height=row, class_="band")
        for place, index in enumerate(order)
        if index in minority
    ]
    parts.append(_names(first, order, minority, row))
    for place, (index, run) in enumerate(members):
        parts.append(_column(run, index, order, left + place * column + GAP, column - GAP, row))
    return tag("div", svg(WIDTH, height, *parts, title="Recall by class"), class_="wide")


def _names(run: Run, order: list[int], minority: set[int], row: float) -> str:
    most = max(run.train_counts, default=0)
    parts = [label(18, HEAD - 12, "class", class_="tick")]
    if run.train_counts:
        parts.append(label(NAMES, HEAD - 12, "training samples", class_="tick"))
    for place, index in enumerate(order):
        y = HEAD + place * row + row / 2
        name = run.classes[index]
        if index in minority:
            parts.append(label(4, y + 4, "◆", hover("minority class"), class_="mark"))
        style = "name minority" if index in minority else "name"
        parts.append(label(18, y + 4, shortened(name, 15), hover(name), class_=style))
        if run.train_counts:
            count = run.train_counts[index]
            bar = count / most * (COUNTS - 62) if most else 0.0
            title = hover(f"{name}: {count:,} training samples")
            parts.append(tag("rect", title, x=NAMES, y=y - 3, width=bar, height=6, class_="count", rx=1))
            parts.append(label(NAMES + bar + 6, y + 4, f"{count:,}", class_="tick"))
    return tag("g", *parts)


def _column(run: Run, index: int, order: list[int], left: float, width: float, row: float) -> str:
    full = width - 40  # leaves room for the value beside a full bar
    bottom = HEAD + len(order) * row
    name = shortened(run.name, int(width / 7.5))
    parts = [label(left, HEAD - 12, name, hover(f"{run.name}: {run.method}"), class_="name minority")]
    for share in (0.0, 0.5, 1.0):
        x = left + share * full
        parts.append(tag("line", x1=x, x2=x, y1=HEAD - 4, y2=bottom + 4, class_="grid"))
        parts.append(label(x, bottom + 17, percent(share, 0), class_="tick", text_anchor="middle"))
    values = recall(run)
    for place, class_index in enumerate(order):
        value, y = values[class_index], HEAD + place * row + row / 2
        title = hover(f"{run.name}, {run.classes[class_index]}: recall {percent(value)} %")
        if value is None:
            parts.append(label(left + 4, y + 4, "not tested", class_="tick"))
            continue
        style = "bar" if class_index in run.minority else "bar other"
        height = row - 8
        parts.append(
            tag(
                "rect",
                title,
                x=left,
                y=y - height / 2,
                width=value * full,
                height=height,
                rx=1.5,
                class_=style,
            )
        )
        parts.append(label(left + value * full + 5, y + 4, percent(value), class_="tick value"))
    return tag("g", *parts, class_=colour(index))

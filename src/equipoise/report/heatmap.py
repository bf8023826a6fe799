"""Draws a confusion matrix as a heat map, with right predictions in one colour and mistakes in another."""

from __future__ import annotations

from equipoise.report.markup import hover, label, percent, shortened, svg, tag
from equipoise.report.reading import Run

SIDE = 470.0  # the width of a matrix; a matrix with many classes is twice as wide
ROOMY = 26  # up to this number of classes, two matrices stand side by side
WRITTEN = 13  # up to this number of classes, the cells show their values
LARGEST = 46.0  # the largest width of a cell


def heatmap(run: Run) -> str:
    """Draw the run's last confusion matrix; each row shows shares of the samples of its class."""
    record = run.last("confusion")
    if record is None:
        return tag("p", "No confusion matrix was kept.", class_="note")
    matrix: list[list[int]] = record["confusion"]
    names = run.classes
    cell = min((SIDE if len(names) <= ROOMY else 2 * SIDE) / max(len(names), 1), LARGEST)
    font = min(12.0, max(cell * 0.85, 4.0))
    longest = max((len(shortened(name, 12)) for name in names), default=1)
    margin = 30 + (longest + 1) * font * 0.62
    length = len(names) * cell
    parts = [tag("rect", x=margin, y=margin, width=length, height=length, class_="field")]
    for i, row in enumerate(matrix):
        total = sum(row)
        for j, count in enumerate(row):
            if count:
                share = count / total
                title = f"{names[i]} taken for {names[j]}: {count:,} of {total:,} ({percent(share)} %)"
                box = _cell(margin + j * cell, margin + i * cell, cell, share, i == j, title)
                parts += [box] if len(names) > WRITTEN else [box, _value(i, j, margin, cell, share)]
    upright = longest <= 2 and cell >= 18
    for index in range(len(names)):
        parts += _names(run, index, margin, margin + (index + 0.5) * cell, font, upright)
    middle = margin + length / 2
    parts.append(label(middle, 11, "predicted", class_="tick", text_anchor="middle"))
    turned = f"rotate(-90 11 {middle:.1f})"
    parts.append(label(11, middle, "true", class_="tick", text_anchor="middle", transform=turned))
    return svg(margin + length + 2, margin + length + 2, *parts, title=f"Confusion matrix of {run.name}")


def scale() -> str:
    """Draw the legend of the colours."""
    parts = []
    for y, kind, meaning in ((0.0, "right", "right"), (14.0, "wrong", "mistaken")):
        for step in range(11):
            depth = _depth(step / 10)
            x = 8.0 + 16 * step
            parts.append(tag("rect", x=x, y=y, width=16, height=12, class_=kind, fill_opacity=depth))
        parts.append(label(192, y + 10, meaning, class_="tick"))
    for share in (0, 50, 100):
        parts.append(label(16 + 1.6 * share, 40, f"{share} %", class_="tick", text_anchor="middle"))
    return tag("div", svg(250, 46, *parts, title="Key to the colours"), class_="key")


def _cell(x: float, y: float, side: float, share: float, right: bool, title: str) -> str:
    inner = side if side < 8 else side - 1  # a thin gap between cells, unless they are tiny
    kind = "right" if right else "wrong"
    return tag("rect", hover(title), x=x, y=y, width=inner, height=inner, class_=kind, fill_opacity=_depth(share))


def _value(i: int, j: int, margin: float, cell: float, share: float) -> str:
    if share < 0.005:
        return ""
    style = "cell deep" if _depth(share) > 0.65 else "cell"
    x, y = margin + (j + 0.5) * cell, margin + (i + 0.5) * cell + 4
    return label(x, y, percent(share, 0), class_=style, text_anchor="middle")


def _names(run: Run, index: int, margin: float, middle: float, font: float, upright: bool) -> list[str]:
    """Write the class beside its row and above its column."""
    name = run.classes[index]
    special = index in run.minority
    style = "name minority" if special else "name"
    shown, edge, low = shortened(name, 12), margin - 6, middle + font * 0.35
    marked = f"◆ {shown}" if special else shown
    beside = label(edge, low, marked, hover(name), class_=style, font_size=font, text_anchor="end")
    if upright:
        above = label(middle, edge, shown, hover(name), class_=style, font_size=font, text_anchor="middle")
    else:
        turned = f"rotate(-90 {low:.1f} {edge:.1f})"
        above = label(low, edge, shown, hover(name), class_=style, font_size=font, transform=turned)
    return [beside, above]


def _depth(share: float) -> float:
    """Return the opacity of a cell: the square root of the share, so that a share of one in twenty is visible."""
    return round(float(share**0.5), 2)

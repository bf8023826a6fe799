"""Helpers that write the HTML and SVG elements of the charts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

MISSING = "\u2013"
COLOURS = 7  # the number of colours in page.css; further lines repeat them with dashes


def tag(name: str, *content: str, **attributes: object) -> str:
    """Write an element. `content` is markup and not escaped, attributes are escaped, and None omits an attribute.

    >>> tag("rect", x=1.5, class_="bar", fill_opacity=0.25)
    '<rect x="1.5" class="bar" fill-opacity="0.25"></rect>'
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{pairs}>{''.join(content)}</{name}>"


def text(content: object) -> str:
    """Escape `content`, so that it is shown literally."""
    return html.escape(str(content))


def label(x: float, y: float, content: object, *extra: str, **attributes: object) -> str:
    """Write a text element of a drawing."""
    return tag("text", text(content), *extra, x=x, y=y, **attributes)


def hover(content: object) -> str:
    """Write the text that a browser shows while the pointer is over the enclosing element."""
    return tag("title", text(content))


def svg(width: float, height: float, *content: str, title: str) -> str:
    return tag(
        "svg",
        *content,
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        role="img",
        aria_label=title,
    )


def swatch(index: int) -> str:
    """Draw a short line in the colour of a run, to stand beside its name."""
    line = tag("line", x1=0, y1=5, x2=18, y2=5, class_="line", stroke_dasharray=dashes(index))
    return tag("svg", line, width=18, height=10, class_=f"swatch {colour(index)}", aria_hidden="true")


def colour(index: int) -> str:
    return f"c{index % COLOURS}"


def dashes(index: int) -> str | None:
    return (None, "6 3", "2 3", "8 3 2 3")[index // COLOURS % 4]


def shortened(name: str, most: int) -> str:
    """Cut a name to at most `most` characters.

    >>> shortened("automobile", 6)
    'autom…'
    """
    return name if len(name) <= most else name[: most - 1] + "…"


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share in percent.

    >>> percent(0.5), percent(None)
    ('50.0', '–')
    """
    return MISSING if value is None else f"{100 * value:.{digits}f}"


def ticks(low: float, high: float, most: int, least_step: float = 0.0) -> list[float]:
    """Return about `most` round numbers that enclose the range from `low` to `high`.

    >>> ticks(0.12, 0.93, 6)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    rough = max((high - low) / max(most - 1, 1), least_step, 1e-9)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 9) for i in range(first, max(last, first + 1) + 1)]


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move the places until they are at least `gap` from each other, inside the bounds if they fit.

    >>> apart([10, 12, 50], 14, 0, 100)
    [10, 24, 50]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    floor = low
    for i in order:
        moved[i] = floor = max(moved[i], floor)
        floor += gap
    ceiling = high
    for i in reversed(order):
        moved[i] = ceiling = min(moved[i], ceiling)
        ceiling -= gap
    return moved


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return html.escape(str(value))

"""How methods fare over the cells of an experiment, of those that were run as long as in the paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from equipoise.papers.comparison import Block, Row, Value
from equipoise.papers.measures import MEASURES

TIE = 0.005  # of two values from one seed each


class Agreement(NamedTuple):
    """Of one method in one measure."""

    method: str
    difference: float | None  # from the paper, the mean of absolute values
    compared: int  # cells behind it
    first_in_paper: int  # cells in which it has the first rank of the paper's methods, there ...
    first: int  # ... and here
    best: int  # cells in which it is the best, or tied with it, of all methods run
    contests: int  # cells in which it was run beside another


def agreement(made: Sequence[Block], measure: str) -> list[Agreement]:
    """Of every method, over cells as they are in the paper."""
    cells = [(one, [row for row in one.rows if one.whole(row)]) for one in made if not one.variant]
    names = dict.fromkeys(row.name for _, rows in cells for row in rows)
    return [_of(name, [rows for _, rows in cells], measure) for name in names]


def _of(name: str, cells: Sequence[Sequence[Row]], measure: str) -> Agreement:
    gaps: list[float] = []
    first_in_paper = first = best = contests = 0
    for rows in cells:
        values = [row.values[measure] for row in rows if row.values[measure].mean is not None]
        mine = next((row.values[measure] for row in rows if row.name == name), None)
        if mine is None or mine.mean is None:
            continue
        if mine.difference is not None:
            gaps.append(abs(mine.difference))
        first_in_paper += mine.paper_rank == 1
        first += mine.rank == 1 and not name.endswith("+")
        if len(values) > 1:
            contests += 1
            best += _best_or_tied(mine, values, MEASURES[measure].lower)
    mean = sum(gaps) / len(gaps) if gaps else None
    return Agreement(name, mean, len(gaps), first_in_paper, first, best, contests)


def _best_or_tied(value: Value, values: Sequence[Value], lower: bool) -> bool:
    """Is it the best, or do its seeds reach those of the best?"""
    sign = -1 if lower else 1
    best = max(values, key=lambda other: sign * (other.mean or 0))
    mine, theirs = (value.low, best.high) if lower else (value.high, best.low)
    assert mine is not None
    assert theirs is not None
    single = value.low == value.high and best.low == best.high
    return value.mean == best.mean or sign * (mine - theirs) >= (-TIE if single else 0)

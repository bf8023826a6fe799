"""Summarises each method over the cells of an experiment that were run with all rounds of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from equipoise.papers.comparison import Block, Row, Value
from equipoise.papers.measures import MEASURES

TIE = 0.005  # two values from one seed each are tied if they differ by no more than this


class Standing(NamedTuple):
    """How one method does in one measure."""

    method: str
    difference: float | None  # mean absolute difference from the paper
    compared: int  # cells over which `difference` is averaged
    first_in_paper: int  # cells in which the method has rank 1 in the paper
    first: int  # cells in which the method has rank 1 among the paper's methods here
    best: int  # cells in which the method is the best of all methods run, or tied with the best
    contests: int  # cells in which at least one other method was run


def standings(made: Sequence[Block], measure: str) -> list[Standing]:
    """Return the standing of every method, over the cells that are not variants."""
    cells = [(one, [row for row in one.rows if one.is_full_length(row)]) for one in made if not one.variant]
    names = dict.fromkeys(row.name for _, rows in cells for row in rows)
    return [_standing(name, [rows for _, rows in cells], measure) for name in names]


def _standing(name: str, cells: Sequence[Sequence[Row]], measure: str) -> Standing:
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
    return Standing(name, mean, len(gaps), first_in_paper, first, best, contests)


def _best_or_tied(value: Value, values: Sequence[Value], lower: bool) -> bool:
    """Whether the value is the best, or its best seed is at least as good as the worst seed of the best method."""
    sign = -1 if lower else 1
    best = max(values, key=lambda other: sign * (other.mean or 0))
    mine, theirs = (value.low, best.high) if lower else (value.high, best.low)
    assert mine is not None
    assert theirs is not None
    single = value.low == value.high and best.low == best.high
    return value.mean == best.mean or sign * (mine - theirs) >= (-TIE if single else 0)

"""Paper and rerun side by side: for each cell and method the printed value, ours over seeds, and both ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from equipoise.papers import results
from equipoise.papers.experiment import Cell, Experiment
from equipoise.papers.measures import MEASURES, shown
from equipoise.papers.results import CellResults, Run
from equipoise.report.markup import MISSING

COLUMNS = ("paper", "ours", "range", "diff.", "rank")  # of each measure in a table


class Value(NamedTuple):
    """Of one measure; None where it is not published, or not measured."""

    paper: float | None
    mean: float | None
    low: float | None
    high: float | None
    paper_rank: int | None = None  # among the paper's methods ...
    rank: int | None = None  # ... of those that were run; beyond the paper, the rank that it would have

    @property
    def difference(self) -> float | None:
        if self.paper is None or self.mean is None or float("inf") in (self.paper, self.mean):
            return None
        return self.mean - self.paper

    def words(self, measure: str) -> list[str]:
        """As the `COLUMNS` of a table."""
        span = f"{shown(measure, self.low)} to {shown(measure, self.high)}" if self.low != self.high else ""
        gap = shown(measure, self.difference, signed=True) if self.difference is not None else ""
        ranks = f"{self.paper_rank or MISSING} → {self.rank}" if self.rank else str(self.paper_rank or "")
        return [shown(measure, self.paper), shown(measure, self.mean), span, gap, ranks]


@dataclass(frozen=True)
class Row:
    method: str
    expression: str
    extra: bool  # beyond the paper
    runs: tuple[Run, ...]  # that are compared: those as long as the paper's, if there are any
    rounds: tuple[int, int]  # of these, the fewest and the most
    values: Mapping[str, Value]

    @property
    def name(self) -> str:
        return f"{self.method} +" if self.extra else self.method

    @property
    def failed(self) -> str | None:
        return next((run["failed"] for run in self.runs if "failed" in run), None)


@dataclass(frozen=True)
class Block:
    """A cell, or a variant of it."""

    cell: Cell
    variant: tuple[str, ...]
    rounds: int  # in the paper
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        return " with ".join([str(self.cell), *self.variant])

    def whole(self, row: Row) -> bool:
        """Was the method run as long as in the paper?"""
        return bool(row.runs) and row.rounds[0] >= self.rounds

    def length(self, row: Row) -> str:
        """How many rounds a method was run, and of how many if the paper has more."""
        if not row.runs:
            return "not run"
        low, high = row.rounds
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return span + (f" of {self.rounds:,}" if low < self.rounds else "") + (" (failed)" if row.failed else "")

    @property
    def run(self) -> bool:
        return any(row.runs for row in self.rows)

    @property
    def complete(self) -> bool:
        """Every method of the paper, as long as there."""
        return all(self.whole(row) for row in self.rows if not row.extra)


def blocks(experiment: Experiment, root: Path, cells: Sequence[Cell] | None = None) -> list[Block]:
    """All cells in order, those not run too, each followed by its variants.

    Runs that were made before the experiment's own settings changed are a variant, too.
    """
    found = [_as_now(one, experiment) for one in results.all_of(root, experiment)]
    made = []
    for cell in experiment.cells() if cells is None else cells:
        mine = [one for one in found if one.cell == cell]
        if not any(one.variant == () for one in mine):
            mine.insert(0, CellResults(experiment.name, cell, (), {}))
        made += [block(experiment, one) for one in mine]
    return made


def _as_now(found: CellResults, experiment: Experiment) -> CellResults:
    changed = results.outdated(found, experiment)
    return replace(found, variant=(*found.variant, *changed)) if changed else found


class Progress(NamedTuple):
    cells: int
    run: int  # all methods of the paper, as long as there
    in_part: int


def progress(experiment: Experiment, root: Path) -> Progress:
    made = [one for one in blocks(experiment, root) if not one.variant]
    done = sum(one.complete for one in made)
    return Progress(len(made), done, sum(one.run for one in made) - done)


def block(experiment: Experiment, found: CellResults) -> Block:
    rounds, cell = experiment.rounds(found.cell), found.cell
    target = experiment.settings(cell)["train"].get("target")
    others = [run["method"] for run in found.runs if run["method"] not in experiment.methods]
    rows = []
    for method in dict.fromkeys([*experiment.methods, *others]):
        every = found.of(method)
        runs = tuple(run for run in every if run["rounds"] >= rounds) or tuple(every)
        span = (min(run["rounds"] for run in runs), max(run["rounds"] for run in runs)) if runs else (0, 0)
        values = {}
        for name in experiment.measures:
            mine = [_read(name, run, found.run(experiment.baseline, run["seed"]), target) for run in runs]
            known = [value for value in mine if value is not None]
            mean = sum(known) / len(known) if known else None
            printed = experiment.printed(cell, method, name)
            values[name] = Value(printed, mean, min(known, default=None), max(known, default=None))
        expression = runs[0]["expression"] if runs else str(experiment.settings(cell, method)["method"])
        rows.append(Row(method, expression, method not in experiment.methods, runs, span, values))
    return Block(cell, found.variant, rounds, tuple(_ranked(rows, experiment.measures)))


def _read(measure: str, run: Run, baseline: Run | None, target: float | None) -> float | None:
    return MEASURES[measure].read(run | {"target": target}, baseline)


def _ranked(rows: Sequence[Row], measures: Iterable[str]) -> list[Row]:
    made = []
    for row in rows:
        values = dict(row.values)
        for name, value in row.values.items():
            peers = [other.values[name] for other in rows if not other.extra]
            lower = MEASURES[name].lower
            printed = _rank(value.paper, [peer.paper for peer in peers], lower)
            values[name] = value._replace(
                paper_rank=printed, rank=_rank(value.mean, [peer.mean for peer in peers], lower)
            )
        made.append(replace(row, values=values))
    return made


def _rank(value: float | None, peers: Sequence[float | None], lower: bool) -> int | None:
    known = [peer for peer in peers if peer is not None]
    if value is None or len(known) < 2:
        return None
    return 1 + sum(peer < value if lower else peer > value for peer in known)

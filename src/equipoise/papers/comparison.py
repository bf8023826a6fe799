"""Compares paper and rerun: for each cell and method the printed value, ours over seeds, and both ranks."""

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

COLUMNS = ("paper", "ours", "range", "diff.", "rank")  # the columns that each measure has in a table


class Value(NamedTuple):
    """One measure of one method in a cell; None means not published, or not measured."""

    paper: float | None
    mean: float | None  # of our runs over seeds, with the lowest and the highest
    low: float | None
    high: float | None
    paper_rank: int | None = None  # in the paper, among its methods
    rank: int | None = None  # of our mean among the paper's methods that were run, also for a method beyond the paper

    @property
    def difference(self) -> float | None:
        if self.paper is None or self.mean is None or float("inf") in (self.paper, self.mean):
            return None
        return self.mean - self.paper

    def words(self, measure: str) -> list[str]:
        """Format the value for the `COLUMNS` of a table."""
        span = f"{shown(measure, self.low)} to {shown(measure, self.high)}" if self.low != self.high else ""
        gap = shown(measure, self.difference, signed=True) if self.difference is not None else ""
        ranks = f"{self.paper_rank or MISSING} → {self.rank}" if self.rank else str(self.paper_rank or "")
        return [shown(measure, self.paper), shown(measure, self.mean), span, gap, ranks]


@dataclass(frozen=True)
class Row:
    """One method in a cell: its runs, and its values of all measures."""

    method: str
    expression: str
    extra: bool  # not a method of the paper
    runs: tuple[Run, ...]  # only those with all rounds of the paper, if there are any; else all
    rounds: tuple[int, int]  # the fewest and the most rounds of `runs`
    values: Mapping[str, Value]  # by the name of the measure

    @property
    def name(self) -> str:
        return f"{self.method} +" if self.extra else self.method

    @property
    def failed(self) -> str | None:
        return next((run["failed"] for run in self.runs if "failed" in run), None)


@dataclass(frozen=True)
class Block:
    """The comparison of one cell, or of a variant of it."""

    cell: Cell
    variant: tuple[str, ...]
    rounds: int  # as many as in the paper
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        return " with ".join([str(self.cell), *self.variant])

    def is_full_length(self, row: Row) -> bool:
        """Whether every compared run of the method has all rounds of the paper."""
        return bool(row.runs) and row.rounds[0] >= self.rounds

    def length(self, row: Row) -> str:
        """Say how many rounds a method was run, such as "30 of 1,000" if the paper has more."""
        if not row.runs:
            return "not run"
        low, high = row.rounds
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return span + (f" of {self.rounds:,}" if low < self.rounds else "") + (" (failed)" if row.failed else "")

    @property
    def has_runs(self) -> bool:
        return any(row.runs for row in self.rows)

    @property
    def complete(self) -> bool:
        """Whether every method of the paper was run with all rounds of the paper."""
        return all(self.is_full_length(row) for row in self.rows if not row.extra)


def blocks(experiment: Experiment, root: Path, cells: Sequence[Cell] | None = None) -> list[Block]:
    """Compare all cells in their order, including those that were not run, each followed by its variants.

    Runs that were made before the settings of the experiment changed are a variant, too.
    """
    found = [_marked_if_outdated(one, experiment) for one in results.all_of(root, experiment)]
    made = []
    for cell in experiment.cells() if cells is None else cells:
        mine = [one for one in found if one.cell == cell]
        if not any(one.variant == () for one in mine):
            mine.insert(0, CellResults(experiment.name, cell, (), {}))
        made += [block(experiment, one) for one in mine]
    return made


def _marked_if_outdated(found: CellResults, experiment: Experiment) -> CellResults:
    changed = results.outdated(found, experiment)
    return replace(found, variant=(*found.variant, *changed)) if changed else found


class Progress(NamedTuple):
    """How many cells an experiment has, how many of them are complete, and how many were run in part."""

    cells: int
    run: int  # cells in which every method of the paper was run with all rounds
    in_part: int


def progress(experiment: Experiment, root: Path) -> Progress:
    made = [one for one in blocks(experiment, root) if not one.variant]
    done = sum(one.complete for one in made)
    return Progress(len(made), done, sum(one.has_runs for one in made) - done)


def block(experiment: Experiment, found: CellResults) -> Block:
    """Compare one cell, or a variant of it."""
    rounds, cell = experiment.rounds(found.cell), found.cell
    target = experiment.settings(cell)["train"].get("target")
    others = [run["method"] for run in found.runs if run["method"] not in experiment.methods]
    rows = []
    for method in dict.fromkeys([*experiment.methods, *others]):
        every = found.runs_of(method)
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
    """Return the rank of `value` among the peers, None if there are fewer than two; `lower` means lower is better."""
    known = [peer for peer in peers if peer is not None]
    if value is None or len(known) < 2:
        return None
    return 1 + sum(peer < value if lower else peer > value for peer in known)

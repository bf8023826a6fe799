"""Tables for the terminal: the list of experiments, and the comparison of a cell with its paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from equipoise import data
from equipoise.papers.comparison import COLUMNS, Block, progress
from equipoise.papers.experiment import Experiment
from equipoise.papers.measures import MEASURES


def listing(experiments: Sequence[Experiment], root: Path, data_dir: Path | None) -> Table:
    """All experiments, how much of each was run, and the data sets that are missing."""
    table = Table(box=None)
    table.add_column("experiment", no_wrap=True, style="bold")
    for title in ("cells", "run", "in part"):
        table.add_column(title, no_wrap=True, justify="right")
    table.add_column("what")
    there = {source.name for source in data.available(data_dir) if source.found}
    for experiment in experiments:
        missing = [source for source in dict.fromkeys(_sources(experiment)) if source not in there]
        counts = [str(count) for count in progress(experiment, root)]
        needs = f"\n[red]not at hand: {', '.join(missing)}[/]" if missing else ""
        table.add_row(experiment.name, *counts, experiment.title + needs)
    return table


def _sources(experiment: Experiment) -> list[str]:
    """The data sets of an experiment's cells."""
    settings = (experiment.settings(cell) for cell in experiment.cells())
    return [raw["data"]["source"] for raw in settings if "data" in raw]


def cell(one: Block) -> Table:
    """One cell of an experiment: a section for each measure, with a row for each method."""
    table = Table(title=f"\n{one.title}", title_justify="left", box=None)
    table.add_column("")
    for column in (*COLUMNS, "rounds", "seeds"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in one.rows[0].values:
        table.add_section()
        table.add_row(f"[bold]{MEASURES[name].title}[/]")
        for row in one.rows:
            words = row.values[name].words(name)
            table.add_row(f"  {row.name}", *words, one.length(row), str(len(row.runs) or ""))
    return table

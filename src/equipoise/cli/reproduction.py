"""The command `reproduce`: runs experiments of papers, and shows and writes the comparison with the papers."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from equipoise.cli import paper_tables
from equipoise.cli.progress import bar
from equipoise.core.errors import ConfigError
from equipoise.core.expression import split
from equipoise.papers import markdown, results, web_page
from equipoise.papers.comparison import Block, blocks, progress
from equipoise.papers.experiment import Experiment, choose, experiments, find
from equipoise.papers.jobs import Job, plan
from equipoise.papers.measures import MEASURES, shown
from equipoise.papers.reproduce import reproduce, seconds
from equipoise.papers.results import Run


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    name: str | None  # the experiment; None: all of them
    cells: tuple[str, ...] = ()
    methods: str | None = None
    extra: bool = False
    seeds: int = 1
    rounds: int | None = None
    budget: str | None = None
    sets: tuple[str, ...] = ()
    data_dir: Path | None = None
    out: Path = Path("runs/reproduce")
    results: Path = Path("results")
    show: bool = False
    markdown: Path | None = None
    html: Path | None = None

    @property
    def command(self) -> str:
        """The command that makes the same runs on another machine: without folders and budget."""
        words = ["equipoise", "reproduce", str(self.name)]
        words += [word for entry in self.cells for word in ("--cells", entry)]
        words += ["--methods", self.methods] if self.methods else []
        words += ["--extra"] if self.extra else []
        words += ["--seeds", str(self.seeds)]
        words += ["--rounds", str(self.rounds)] if self.rounds else []
        words += [word for entry in self.sets for word in ("--set", entry)]
        return shlex.join(words)


def reproduce_papers(asked: Request, out: Console, err: Console) -> list[dict[str, Any]]:
    """Run what is missing (unless `show` is set), print the comparison, and return it in a form for JSON."""
    chosen = list(experiments().values()) if asked.name is None else [find(asked.name)]
    if asked.name is None and not (asked.markdown or asked.html):
        out.print(paper_tables.listing(chosen, asked.results, asked.data_dir))
        return [
            {"experiment": one.name, "title": one.title, **progress(one, asked.results)._asdict()} for one in chosen
        ]
    found: list[dict[str, Any]] = []
    if asked.name is not None:
        (experiment,) = chosen
        cells = choose(experiment, asked.cells)
        if not asked.show:
            _run(asked, _jobs(asked, experiment), err)
        made = blocks(experiment, asked.results, cells)
        out.print(f"[bold]{experiment.name}[/]: {experiment.title}. {experiment.paper}.")
        for one in made:
            out.print(paper_tables.cell(one))
        found = [as_json(one) for one in made]
    if asked.markdown:
        for file in markdown.write(chosen, asked.results, asked.markdown):
            err.print(f"wrote {file}", soft_wrap=True)
    if asked.html:
        err.print(f"wrote {web_page.write(chosen, asked.results, asked.html)}", soft_wrap=True)
    return found


def _jobs(asked: Request, experiment: Experiment) -> list[Job]:
    names = split(asked.methods) if asked.methods else list(experiment.methods)
    if asked.rounds is not None and asked.rounds < 1:
        raise ConfigError(f"--rounds {asked.rounds}: expected 1 or more")
    sets = [*asked.sets, *([f"train.rounds={asked.rounds}"] if asked.rounds else [])]
    if asked.data_dir is not None:
        sets.append(f"data.dir={json.dumps(str(asked.data_dir))}")
    names += list(experiment.extra) if asked.extra else []
    return plan(experiment, choose(experiment, asked.cells), names, asked.seeds, sets)


def _run(asked: Request, jobs: Sequence[Job], err: Console) -> None:
    deadline = None if asked.budget is None else time.monotonic() + seconds(asked.budget)
    todo = list(results.missing(jobs, asked.results))
    err.print(f"{_runs(len(jobs))}, {len(jobs) - len(todo)} already done")
    with bar(err, total_runs=len(todo)) as watch:
        runs = reproduce(todo, asked.out, asked.results, watch, command=asked.command, deadline=deadline)
        for done, (job, run) in enumerate(runs, start=1):
            err.print(f"{done} of {len(todo)}: {_line(job, run)}", soft_wrap=True, highlight=False)
    if late := len(list(results.missing(todo, asked.results))):
        why = f"the budget of {asked.budget} is spent: " if asked.budget else ""
        err.print(f"{why}{_runs(late)} not done; run the same command to continue")


def _runs(number: int) -> str:
    return f"{number} run" if number == 1 else f"{number} runs"


def _line(job: Job, run: Run) -> str:
    read = {name: MEASURES[name].read(run, None) for name in job.experiment.measures}
    known = {name: value for name, value in read.items() if value is not None}
    values = ", ".join(f"{MEASURES[name].title} {shown(name, value)}" for name, value in known.items())
    ended = f"failed: {run['failed']}" if "failed" in run else values
    part = f" of {job.rounds}" if run["rounds"] < job.rounds else ""
    return f"{job.cell} {job.method} seed {job.seed}: {run['rounds']}{part} rounds in {run['seconds']:.0f} s, {ended}"


def as_json(one: Block) -> dict[str, Any]:
    """A comparison in a form for JSON."""
    rows = [
        {
            "method": row.method,
            "expression": row.expression,
            "extra": row.extra,
            "seeds": len(row.runs),
            "rounds": row.rounds[0],
            "values": {
                name: value._asdict() | {"difference": value.difference} for name, value in row.values.items()
            },
        }
        for row in one.rows
    ]
    return {"cell": dict(one.cell.values), "variant": list(one.variant), "rounds": one.rounds, "methods": rows}

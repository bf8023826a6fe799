"""Executes jobs: similar small ones at the same time, each in a run folder from which it can be resumed."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from equipoise import data
from equipoise.core.engine import Seat
from equipoise.core.errors import DataError, TrainingError
from equipoise.papers import balance, synthetic
from equipoise.papers.jobs import Job
from equipoise.papers.results import Run
from equipoise.papers.summary import curve, summary
from equipoise.runs import grouping
from equipoise.runs.compare import run_or_resume
from equipoise.runs.config import Config
from equipoise.runs.folder import read_metrics
from equipoise.runs.grouping import side_by_side
from equipoise.runs.run import Stopped, Watch


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    watch: Watch,
    deadline: float | None = None,
    most: Callable[[Config], int] = grouping.at_once,
) -> Iterator[tuple[Job, Run]]:
    """Execute the jobs, and yield the record of each run when it ends or is stopped.

    After the deadline, a time of `time.monotonic`, no job starts, and running jobs stop. `most` is the largest number
    of runs of a config that are executed at the same time.
    """

    def late() -> bool:
        return deadline is not None and time.monotonic() >= deadline

    watch = replace(watch, stop=late)
    for group in grouping.groups([job.config if job.experiment.kind == "training" else None for job in jobs], most):
        if late():
            return
        chosen, began = [jobs[number] for number in group], time.monotonic()
        works = [partial(KINDS[job.experiment.kind], job, job.folder(out), watch) for job in chosen]
        for place, found in side_by_side(works):
            if found is not None:
                share = (time.monotonic() - began) / len(group)  # the time of the group is divided among its runs
                yield chosen[place], {**run_fields(chosen[place]), "seconds": share, **found}


def run_fields(job: Job) -> Run:
    """Return the fields of a run's record that follow from the job alone."""
    return {
        "method": job.method,
        "expression": job.expression,
        "changes": job.changes,
        "seed": job.seed,
        "asked": job.rounds,
    }


def _train(job: Job, folder: Path, watch: Watch, seat: Seat | None) -> Run | None:
    _check_samples(job)
    config, failed = job.config, {}
    resumed = (folder / "config.json").exists()
    try:
        run_or_resume(config, folder, watch, seat)
    except Stopped:
        pass
    except TrainingError as error:  # this method failed in this cell; the other jobs go on
        failed = {"failed": str(error)}
    if not read_metrics(folder):
        return {"rounds": 0, "last": {}, **failed} if failed else None
    return {**summary(folder, config, job.experiment), "resumed": resumed, **failed}


def _balance(job: Job, folder: Path, watch: Watch, seat: Seat | None) -> Run:
    _check_samples(job)
    return {"rounds": job.rounds, "last": balance.measured(job.config), "execution": _here()}


def _estimate(job: Job, folder: Path, watch: Watch, seat: Seat | None) -> Run:
    last, records = synthetic.estimate(job.settings, job.seed)
    return {"rounds": job.rounds, "last": last, "curve": curve(records, job.experiment), "execution": _here()}


KINDS: dict[str, Callable[[Job, Path, Watch, Seat | None], Run | None]] = {
    "training": _train,
    "balance": _balance,
    "estimate": _estimate,
}


def _here() -> dict[str, str]:
    return {"device": "cpu", "machine": platform.machine(), "torch": torch.__version__}


def _check_samples(job: Job) -> None:
    """Refuse another data set of the same name and layout, if the cell says how many samples it expects."""
    expected = job.experiment.words(job.cell).get("samples")
    if expected is None:
        return
    table = job.config.data
    there = _samples(table.source, table.dir, tuple(sorted(table.options.items())))
    if there != expected:
        raise DataError(
            f"{job.experiment.name}, {job.cell}: expected a data set of {expected:,} training samples, and the"
            f" {table.source} at hand has {there:,}; choose the cells of another dataset with --cells"
        )


@cache
def _samples(source: str, folder: str | None, options: tuple[tuple[str, Any], ...]) -> int:
    return len(data.load(source, folder, **dict(options)).y)

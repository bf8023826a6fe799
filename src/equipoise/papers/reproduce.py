"""Reruns an experiment: finished runs are not repeated, stopped runs are resumed, every result is saved at once."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import equipoise
from equipoise.core.errors import ConfigError
from equipoise.papers import results
from equipoise.papers.experiment import experiments
from equipoise.papers.jobs import Job
from equipoise.papers.results import Run
from equipoise.papers.runner import run_fields, run_jobs
from equipoise.runs.run import Watch

Runner = Callable[[Sequence[Job], Path, Watch, float | None], Iterator[tuple[Job, Run]]]

UNITS = {"h": 3600, "m": 60, "s": 1}  # in seconds


def reproduce(
    jobs: Sequence[Job],
    out: Path,
    root: Path,
    watch: Watch,
    *,
    command: str,
    deadline: float | None = None,
    runner: Runner = run_jobs,
) -> Iterator[tuple[Job, Run]]:
    """Execute the jobs in run folders under `out`, save each result under `root`, and yield it.

    A run that another experiment has already made is copied, not repeated. `command` is stored with the results.
    """
    made = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "equipoise": equipoise.__version__,
        "python": platform.python_version(),
    }
    shared = list(_shared(jobs, root))
    for job, run in shared:
        yield job, _save(job, run, root)
    done = {job for job, _ in shared}
    for job, run in runner([job for job in jobs if job not in done], out, watch, deadline):
        yield job, _save(job, run | {"made": made}, root)


def _shared(jobs: Sequence[Job], root: Path) -> Iterator[tuple[Job, Run]]:
    """Yield the jobs that another experiment has already run, since tables overlap, with those runs."""
    trainings = [job for job in jobs if job.experiment.kind == "training"]
    known = results.known_runs(root, experiments().values()) if trainings else {}
    for job in trainings:
        run = known.get(results.key_of(job.settings, job.seed))
        if run is not None and run["rounds"] >= job.rounds:
            yield job, run | run_fields(job)


def _save(job: Job, run: Run, root: Path) -> Run:
    with results.locked(root, job.experiment):
        cell = results.read(root, job.experiment, job.cell, job.variant)
        before = cell.run(job.method, job.seed)
        if run.pop("resumed", False) and before is not None:
            run["seconds"] += before["seconds"]
        cell.with_run(run).write(root)
    return run


def seconds(budget: str) -> float:
    """Read a duration.

    >>> seconds("10m"), seconds("1h30m"), seconds("45")
    (600.0, 5400.0, 45.0)
    """
    if re.fullmatch(r"\d+(\.\d+)?", budget):
        return float(budget)
    if not re.fullmatch(r"(\d+h)?(\d+m)?(\d+s)?", budget) or not budget:
        raise ConfigError(f"--budget {budget!r}: expected a time such as 10m, 1h30m or 90s")
    return float(sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)([hms])", budget)))


def _commit() -> str | None:
    """Return the commit of the source, with "-dirty" if files were changed; None without a repository."""
    words = ["git", "-C", str(Path(equipoise.__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None

"""The stored results: one small JSON file per cell, `results/EXPERIMENT/CELL.json`.

For each run it holds the numbers of the last and of the best round, a thinned curve, the time, and the command and
versions that made it. An unfinished run is stored too; it has fewer `rounds` than were `asked`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.core.errors import CheckpointError, ConfigError
from equipoise.papers.experiment import Cell, Experiment, flat, merge, nested, slug
from equipoise.papers.jobs import EXECUTION, Job, identity
from equipoise.runs.checkpoint import write_atomically
from equipoise.runs.config import Config
from equipoise.runs.folder import finite

FORMAT, VERSION = "equipoise results", 1

Run = dict[str, Any]


@dataclass(frozen=True)
class CellResults:
    """The runs of a cell, or of a variant of it, and the settings that they have in common."""

    experiment: str
    cell: Cell
    variant: tuple[str, ...]
    settings: Mapping[str, Any]
    runs: tuple[Run, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.experiment}/{'@'.join([self.cell.slug, *map(slug, self.variant)])}.json"

    def run(self, method: str, seed: int) -> Run | None:
        return next((run for run in self.runs if run["method"] == method and run["seed"] == seed), None)

    def runs_of(self, method: str) -> list[Run]:
        return sorted((run for run in self.runs if run["method"] == method), key=lambda run: run["seed"])

    def with_run(self, run: Run) -> CellResults:
        """Add a run; of two runs with the same method, expression and seed, the one with more rounds stays."""
        known = self.run(run["method"], run["seed"])
        if known is not None and known["expression"] == run["expression"] and known["rounds"] > run["rounds"]:
            return self
        others = [kept for kept in self.runs if kept is not known]
        ordered = sorted([*others, run], key=lambda kept: (kept["method"], kept["seed"]))
        return CellResults(self.experiment, self.cell, self.variant, self.settings, tuple(ordered))

    def write(self, root: Path) -> None:
        head = {
            "format": FORMAT,
            "version": VERSION,
            "experiment": self.experiment,
            "cell": dict(self.cell.values),
            "variant": list(self.variant),
        }
        # One line per run and per table keeps the files short, and the differences between versions too.
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        tables = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in self.settings.items()]
        runs = [f"  {json.dumps(_rounded(finite(run)))}" for run in self.runs]
        lines += [' "settings": {\n' + ",\n".join(tables) + "\n }", ' "runs": [\n' + ",\n".join(runs) + "\n ]"]
        path = root / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


@contextmanager
def locked(root: Path, experiment: Experiment) -> Iterator[None]:
    """Hold a lock on the results of an experiment, since several processes may run parts of one table."""
    folder = root / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released when the handle is closed, or when the process ends
        yield
    finally:
        os.close(handle)


def read(root: Path, experiment: Experiment, cell: Cell, variant: tuple[str, ...] = ()) -> CellResults:
    """Read the results of a cell, which are empty if nothing was run; refuse a file made with other settings."""
    empty = CellResults(experiment.name, cell, variant, common(experiment, cell, variant))
    path = root / empty.file
    if not path.exists():
        return empty
    found = _parse(path)
    if changed := outdated(found, experiment):
        raise ConfigError(
            f"{path} has runs with other settings ({', '.join(changed)}): move the file away, or use --set to run"
            " with the settings in it"
        )
    return found


def all_of(root: Path, experiment: Experiment) -> list[CellResults]:
    """Read every file of an experiment, including variants, in the order of its cells."""
    found = [_parse(path) for path in sorted((root / experiment.name).glob("*.json"))]
    place = {cell: number for number, cell in enumerate(experiment.cells())}
    return sorted((one for one in found if one.cell in place), key=lambda one: (place[one.cell], one.variant))


def known_runs(root: Path, experiments: Iterable[Experiment]) -> dict[tuple[str, int], Run]:
    """Return the trainings of all experiments by `key_of`, since tables share some; of equal ones the longest."""
    index: dict[tuple[str, int], Run] = {}
    for experiment in experiments:
        if experiment.kind == "training":
            for one in all_of(root, experiment):
                for run in one.runs:
                    changes = (nested(path, value) for path, value in run["changes"].items())
                    key = key_of(merge(one.settings, *changes, {"method": run["expression"]}), run["seed"])
                    if key not in index or index[key]["rounds"] < run["rounds"]:
                        index[key] = run
    return index


def key_of(settings: Mapping[str, Any], seed: int) -> tuple[str, int]:
    """Return a key that is equal for equal runs of different experiments."""
    return identity(merge(settings, {"train": {"seed": 0}})), seed


def missing(jobs: Iterable[Job], root: Path) -> Iterator[Job]:
    """Yield the jobs without a stored run that has all their rounds."""
    for job in jobs:
        run = read(root, job.experiment, job.cell, job.variant).run(job.method, job.seed)
        if run is None or run["expression"] != job.expression or run["rounds"] < job.rounds:
            yield job


def common(experiment: Experiment, cell: Cell, variant: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the settings that the runs of a cell share, with all defaults, without those in `EXECUTION`."""
    return _resolved(experiment.settings(cell, sets=variant), experiment)


def _resolved(raw: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
    if experiment.kind != "estimate":
        tables = Config.from_dict(raw).to_dict()
        raw = {table: tables[table] for table in ("data", "model", "local", "train")}
        del raw["train"]["seed"]
    settings: dict[str, Any] = finite(_without_execution(raw))
    return settings


def outdated(found: CellResults, experiment: Experiment) -> list[str]:
    """List how the settings of stored runs differ from those that the experiment has now."""
    before = _resolved(found.settings, experiment)
    return differences(before, common(experiment, found.cell, found.variant))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the settings in which two configs differ.

    >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    ['a.c = 2, now 3']
    """
    before, after = dict(flat(old)), dict(flat(new))
    paths = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    return [f"{path} = {before.get(path)!r}, now {after.get(path)!r}" for path in paths]


def _without_execution(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            kept[key] = _without_execution(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" not in EXECUTION:
            kept[key] = value
    return kept


def _parse(path: Path) -> CellResults:
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f"expected {FORMAT} of version {VERSION}")
        cell = Cell(tuple(content["cell"].items()))
        runs = tuple(content["runs"])
        if not all({"method", "expression", "changes", "seed", "rounds", "last"} <= set(run) for run in runs):
            raise ValueError("a run lacks some of its fields")
        return CellResults(content["experiment"], cell, tuple(content["variant"]), content["settings"], runs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as results ({type(error).__name__}: {error})") from error


def _rounded(value: Any) -> Any:
    """Round to five significant digits; repeated runs agree in fewer."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value

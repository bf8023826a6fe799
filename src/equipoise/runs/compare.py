"""Several runs for one table: methods over seeds, or the points of a grid.

Calling `run_all` again resumes the runs that were cut off and keeps those that are finished.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from equipoise.core.engine import Seat
from equipoise.core.errors import ConfigError
from equipoise.methods.registry import parse
from equipoise.runs import grouping, run
from equipoise.runs.baselines import CENTRALISED, LOCAL
from equipoise.runs.checkpoint import write_atomically
from equipoise.runs.config import Config, override
from equipoise.runs.folder import read_config
from equipoise.runs.grouping import side_by_side
from equipoise.runs.metrics import interval
from equipoise.runs.run import Watch

SHOWN = ("accuracy", "minority_accuracy", "worst_class_accuracy", "balanced_accuracy", "macro_f1")


@dataclass(frozen=True)
class Cell:
    """One row of the table: a name, and a config for each seed."""

    name: str
    configs: tuple[Config, ...]

    def folder(self, out: Path, config: Config) -> Path:
        return out / re.sub(r"[^A-Za-z0-9.=_-]+", "_", self.name).strip("_") / f"seed-{config.train.seed}"


def cells(config: Config, changes: Mapping[str, Sequence[str]], seeds: int) -> list[Cell]:
    """Return a cell for each named list of `--set` changes, with `seeds` seeds that start at the config's own."""
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: expected 1 or more")
    made = []
    for name, sets in changes.items():
        raw = override(config.to_dict(), sets)
        first = Config.from_dict(raw)
        if first.method not in (CENTRALISED, LOCAL):
            parse(first.method)
        numbers = range(first.train.seed, first.train.seed + seeds)
        made.append(Cell(name, tuple(Config.from_dict(override(raw, [f"train.seed={seed}"])) for seed in numbers)))
    return made


def run_all(
    made: Sequence[Cell], out: Path, watch: Watch, most: Callable[[Config], int] = grouping.at_once
) -> list[tuple[Cell, Config, dict[str, Any]]]:
    """Carry out all runs and return their results in order. Small, similar runs are trained at the same time.

    `most` says how many runs such as a given one may train at the same time.
    """
    todo = [(cell, config) for cell in made for config in cell.configs]
    results: dict[int, dict[str, Any]] = {}
    for group in grouping.groups([config for _, config in todo], most):
        chosen = [todo[number] for number in group]
        works = [partial(run_or_resume, config, cell.folder(out, config), watch) for cell, config in chosen]
        results |= {group[place]: result for place, result in side_by_side(works)}
    return [(*pair, results[number]) for number, pair in enumerate(todo)]


def run_or_resume(config: Config, folder: Path, watch: Watch, seat: Seat | None = None) -> dict[str, Any]:
    """Start a run, or resume it if its folder exists already."""
    if not (folder / "config.json").exists():
        return run.run(config, folder, watch, seat)
    if Config.from_dict(read_config(folder)) != config:
        raise ConfigError(f"{folder} holds a run of another config: choose another --out, or remove that folder")
    return run.resume(folder, watch, seat)


def summary(results: Sequence[tuple[Cell, Config, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row per cell: mean and 95 % interval over seeds of the last round's metrics, and the mean minority
    accuracy of the best round."""
    rows = []
    for name in dict.fromkeys(cell.name for cell, _, _ in results):
        mine = [result for cell, _, result in results if cell.name == name]
        row: dict[str, Any] = {"name": name, "seeds": len(mine)}
        for key in SHOWN:
            mean, half = interval([result["last"].get(key) for result in mine])
            row[key] = {"mean": mean, "interval": half}
        best = [result["best"]["record"].get("minority_accuracy") for result in mine if result.get("best")]
        row["best_minority_accuracy"] = {"mean": interval(best)[0] if best else None}
        row["best_on"] = next((result["best"]["on"] for result in mine if result.get("best")), None)
        rows.append(row)
    return rows


def write(rows: list[dict[str, Any]], path: Path) -> None:
    write_atomically(path, json.dumps(rows, indent=1).encode())

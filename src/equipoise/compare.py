"""Several runs side by side: methods over seeds, or the cells of a grid.

What was cut off is resumed, what is done is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from equipoise import company, runs
from equipoise.baselines import CENTRALISED, LOCAL
from equipoise.checkpoint import write_atomically
from equipoise.config import Config, override
from equipoise.engines.together import Seat, side_by_side
from equipoise.errors import ConfigError
from equipoise.folder import read_config
from equipoise.metrics import interval

SHOWN = ("accuracy", "minority_accuracy", "worst_class_accuracy", "balanced_accuracy", "macro_f1")


@dataclass(frozen=True)
class Cell:
    """One row of the table to come: a config for each seed."""

    name: str
    configs: tuple[Config, ...]

    def folder(self, out: Path, config: Config) -> Path:
        return out / re.sub(r"[^A-Za-z0-9.=_-]+", "_", self.name).strip("_") / f"seed-{config.train.seed}"


def cells(config: Config, changes: Mapping[str, Sequence[str]], seeds: int) -> list[Cell]:
    """A cell for each named list of `--set` changes, over so many seeds from the config's own on."""
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: expected 1 or more")
    made = []
    for name, sets in changes.items():
        raw = override(config.to_dict(), sets)
        first = Config.from_dict(raw)
        if first.method not in (CENTRALISED, LOCAL):
            runs.parse_method(first.method)
        numbers = range(first.train.seed, first.train.seed + seeds)
        made.append(Cell(name, tuple(Config.from_dict(override(raw, [f"train.seed={seed}"])) for seed in numbers)))
    return made


def carry_out(
    made: Sequence[Cell], out: Path, watch: runs.Watch, most: Callable[[Config], int] = company.at_once
) -> list[tuple[Cell, Config, dict[str, Any]]]:
    """The results of all cells, in order; small runs that are alike go at once."""
    todo = [(cell, config) for cell in made for config in cell.configs]
    results: dict[int, dict[str, Any]] = {}
    for group in company.groups([config for _, config in todo], most):
        chosen = [todo[number] for number in group]
        works = [partial(carry_on, config, cell.folder(out, config), watch) for cell, config in chosen]
        results |= {group[place]: result for place, result in side_by_side(works)}
    return [(*pair, results[number]) for number, pair in enumerate(todo)]


def carry_on(config: Config, folder: Path, watch: runs.Watch, seat: Seat | None = None) -> dict[str, Any]:
    """Begin a run, or go on with what its folder has of it."""
    if not (folder / "config.json").exists():
        return runs.run(config, folder, watch, seat)
    if read_config(folder) != config.to_dict():
        raise ConfigError(f"{folder} holds a run of another config: choose another --out, or remove it")
    return runs.resume(folder, watch, seat)


def summary(results: Sequence[tuple[Cell, Config, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row per cell: mean and 95 % interval over seeds of the last round's metrics, and of the best round's."""
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

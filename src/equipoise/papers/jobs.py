"""Plans the runs of an experiment. `runner.py` executes them, several at once where that is possible."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.core.errors import ConfigError
from equipoise.methods.registry import parse
from equipoise.papers.experiment import Cell, Experiment, flat, slug
from equipoise.runs.baselines import CENTRALISED, LOCAL
from equipoise.runs.config import Config

# Settings that decide how a run is executed, how long, or how it is evaluated, but not which experiment it is.
EXECUTION = frozenset({
    "data.dir", "train.block", "train.checkpoint_every", "train.checkpoint_seconds", "train.compile", "train.device",
    "train.engine", "train.evaluate_every", "train.memory_gib", "train.precision", "train.rounds", "train.target",
    "train.threads",
})  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One run: a cell, a method and a seed."""

    experiment: Experiment
    cell: Cell
    method: str  # its name in the experiment, or an expression
    seed: int
    sets: tuple[str, ...] = ()  # changes to the settings, such as "local.lr=1"

    @property
    def settings(self) -> dict[str, Any]:
        return self.experiment.settings(self.cell, self.method, (*self.sets, f"train.seed={self.seed}"))

    @property
    def config(self) -> Config:
        return Config.from_dict(self.settings)

    @property
    def expression(self) -> str:
        return str(self.settings["method"])

    @property
    def rounds(self) -> int:
        return int(self.settings["train"]["rounds"])

    @property
    def variant(self) -> tuple[str, ...]:
        return variant(self.sets)

    @property
    def changes(self) -> dict[str, Any]:
        """The settings of the cell that the method changes, except those that `sets` change."""
        fixed = {entry.partition("=")[0] for entry in self.variant}
        made = self.experiment.changes(self.cell, self.method)
        return {path: value for path, value in made.items() if path not in fixed}

    def folder(self, out: Path) -> Path:
        """Return the run folder; a run with another number of rounds than in the paper has its own folder."""
        parts = [self.experiment.name, "@".join([self.cell.slug, *map(slug, self.variant)]), slug(self.method)]
        if self.rounds != self.experiment.rounds(self.cell):
            parts.append(f"rounds-{self.rounds}")
        return out.joinpath(*parts, f"seed-{self.seed}")

    def check(self) -> None:
        """Raise ConfigError if the config or the expression is invalid, before anything is run."""
        if self.experiment.kind == "estimate":
            if self.method not in self.experiment.methods:
                raise ConfigError(
                    f"--methods {self.method!r}: {self.experiment.name} expects one of {_names(self.experiment)}"
                )
            return
        config = self.config
        if config.method not in (CENTRALISED, LOCAL):
            parse(config.method)


def variant(sets: Sequence[str]) -> tuple[str, ...]:
    """Return the changes that make the setting differ from the paper's: all but those in `EXECUTION`.

    >>> variant(["train.device=cpu", "data.partition.alpha=0.3"])
    ('data.partition.alpha=0.3',)
    """
    pairs = (entry.partition("=") for entry in sets)
    stripped = {key.strip(): value.strip() for key, _, value in pairs}
    return tuple(f"{key}={value}" for key, value in sorted(stripped.items()) if key not in EXECUTION)


def plan(
    experiment: Experiment, cells: Sequence[Cell], methods: Sequence[str], seeds: int, sets: Sequence[str] = ()
) -> list[Job]:
    """List every run: cell after cell, so that whole cells are done early, and in a cell seed after seed."""
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: expected 1 or more")
    jobs = [
        Job(experiment, cell, name, seed, tuple(sets))
        for cell in cells
        for seed in range(seeds)
        for name in dict.fromkeys(_known(experiment, cell, method) for method in methods)
    ]
    for job in jobs:
        if job.seed == 0:
            job.check()
    return jobs


def identity(settings: Mapping[str, Any]) -> str:
    """Return a key that is equal for equal runs of different experiments: the config without `EXECUTION`."""
    kept = {path: value for path, value in flat(Config.from_dict(settings).to_dict()) if path not in EXECUTION}
    return json.dumps(kept, sort_keys=True)


def _known(experiment: Experiment, cell: Cell, method: str) -> str:
    """Return the experiment's name for a method that is given as an expression, else the method as it is."""
    if method in experiment.methods or method in experiment.extra:
        return method
    for name in (*experiment.methods, *experiment.extra):
        if experiment.settings(cell, name)["method"] == method:
            return name
    return method


def _names(experiment: Experiment) -> str:
    return ", ".join((*experiment.methods, *experiment.extra))

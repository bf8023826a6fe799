"""Which runs are to be done. Carrying them out is another matter, so that a carrier may take several at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise import runs
from equipoise.baselines import CENTRALISED, LOCAL
from equipoise.config import Config
from equipoise.errors import ConfigError
from equipoise.papers.experiment import Cell, Experiment, flat, slug

# How a run is carried out or looked at, not what it is.
EXECUTION = frozenset({
    "data.dir", "train.block", "train.checkpoint_every", "train.checkpoint_seconds", "train.compile", "train.device",
    "train.engine", "train.evaluate_every", "train.memory_gib", "train.precision", "train.rounds", "train.target",
    "train.threads",
})  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One run of a cell: a method and a seed."""

    experiment: Experiment
    cell: Cell
    method: str  # its name in the table
    seed: int
    sets: tuple[str, ...] = ()  # changes to the settings

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
        """What the method changes in the settings of the cell, where they are not set otherwise."""
        fixed = {entry.partition("=")[0] for entry in self.variant}
        made = self.experiment.changes(self.cell, self.method)
        return {path: value for path, value in made.items() if path not in fixed}

    def folder(self, out: Path) -> Path:
        """A run of another length than the paper's has a folder of its own."""
        parts = [self.experiment.name, "@".join([self.cell.slug, *map(slug, self.variant)]), slug(self.method)]
        if self.rounds != self.experiment.rounds(self.cell):
            parts.append(f"rounds-{self.rounds}")
        return out.joinpath(*parts, f"seed-{self.seed}")

    def check(self) -> None:
        """Refuse a config or an expression that cannot be, before anything is run."""
        if self.experiment.kind == "estimate":
            if self.method not in self.experiment.methods:
                raise ConfigError(f"--methods {self.method!r}: {self.experiment.name} has {_names(self.experiment)}")
            return
        config = self.config
        if config.method not in (CENTRALISED, LOCAL):
            runs.parse_method(config.method)


def variant(sets: Sequence[str]) -> tuple[str, ...]:
    """The changes that make it another setting than the paper's.

    >>> variant(["train.device=cpu", "data.partition.alpha=0.3"])
    ('data.partition.alpha=0.3',)
    """
    pairs = (entry.partition("=") for entry in sets)
    stripped = {key.strip(): value.strip() for key, _, value in pairs}
    return tuple(f"{key}={value}" for key, value in sorted(stripped.items()) if key not in EXECUTION)


def plan(
    experiment: Experiment, cells: Sequence[Cell], methods: Sequence[str], seeds: int, sets: Sequence[str] = ()
) -> list[Job]:
    """Every run, cell after cell, so that whole cells are there early; in a cell, all methods with the first seed."""
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
    """What a run is, whichever experiment it belongs to: its whole config but how it is executed, and how long."""
    kept = {path: value for path, value in flat(Config.from_dict(settings).to_dict()) if path not in EXECUTION}
    return json.dumps(kept, sort_keys=True)


def _known(experiment: Experiment, cell: Cell, method: str) -> str:
    """The name under which the experiment has a method, where it is given as an expression."""
    if method in experiment.methods or method in experiment.extra:
        return method
    for name in (*experiment.methods, *experiment.extra):
        if experiment.settings(cell, name)["method"] == method:
            return name
    return method


def _names(experiment: Experiment) -> str:
    return ", ".join((*experiment.methods, *experiment.extra))

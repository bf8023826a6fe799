"""What is kept of a run folder: the numbers of its last and best rounds, a thinned curve, and how it was executed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.baselines import CENTRALISED, LOCAL
from equipoise.config import Config
from equipoise.errors import CheckpointError
from equipoise.folder import read_metrics
from equipoise.methods import Astraea
from equipoise.overhead import traffic
from equipoise.papers.experiment import CURVE, Experiment
from equipoise.papers.measures import MEASURES
from equipoise.runs import parse_method

OF_LAST = (
    "round", "accuracy", "balanced_accuracy", "minority_accuracy", "minority_mean", "worst_class_accuracy",
    "macro_f1", "loss", "recall",
)  # fmt: skip
OF_BEST = ("round", "accuracy", "balanced_accuracy", "minority_accuracy")
OF_PLAN = ("device", "machine", "engine", "precision", "compile_from", "together", "torch")


def summary(folder: Path, config: Config, experiment: Experiment) -> dict[str, Any]:
    """Of a run that is finished or not, but has at least one record."""
    records, federation, plan = read_metrics(folder), _read(folder / "federation.json"), _read(folder / "plan.json")
    last, select = records[-1], config.train.select
    judge = f"validation_{select}" if f"validation_{select}" in last else select
    judged = [record for record in records if record.get(judge) is not None]
    best = max(judged, key=lambda record: record[judge], default=None)  # the first of equals
    kept = {key: value for key, value in last.items() if key in OF_LAST or "." in key}
    return {
        "rounds": last["round"],
        "last": kept | _of_methods(last, federation["train_counts"]),
        "best": best and {key: best.get(key) for key in OF_BEST},
        "bests": _rising([(record["round"], record[judge]) for record in judged]),
        "curve": curve(records, experiment),
        "bytes": {"up": last.get("bytes_up"), "down": last.get("bytes_down")},
        "traffic": _traffic(config, federation),
        "execution": {key: plan[key] for key in OF_PLAN if key in plan},
    }


def curve(records: Sequence[Mapping[str, Any]], experiment: Experiment) -> dict[str, list[Any]]:
    """What the experiment's measures draw, at some fifty rounds, the last among them."""
    if not records:
        return {}
    stride = -(-len(records) // CURVE)
    chosen = [*records[:-1:stride], records[-1]]
    keys = ["round", *dict.fromkeys(drawn for name in experiment.measures if (drawn := MEASURES[name].curve))]
    return {key: [record[key] for record in chosen] for key in keys if chosen[-1].get(key) is not None}


def _rising(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    """(round, value) wherever a value is above all before it, which tells when any value was first reached."""
    rising: list[list[float]] = []
    for at, value in points:
        if not rising or value > rising[-1][1]:
            rising.append([at, value])
    return rising


def _of_methods(last: Mapping[str, Any], counts: Sequence[int]) -> dict[str, float]:
    """What a method measures itself, under the names that `measures` knows."""
    made: dict[str, float] = {}
    if "astraea.storage" in last:
        made = {"storage": last["astraea.storage"], "kld": last["astraea.kld_mediators"]}
    if "fedre.share_0" in last and all(counts):
        truth = [count / sum(counts) for count in counts]
        made["share_error"] = max(abs(last[f"fedre.share_{c}"] - true) / true for c, true in enumerate(truth))
    return made


def _traffic(config: Config, federation: Mapping[str, Any]) -> int | None:
    """Bytes of a round as Astraea's Section 4.3 counts them: the model there and back, for each visit."""
    if config.method in (CENTRALISED, LOCAL):
        return None
    cohort, there = config.train.cohort, federation["clients"] - federation["empty_clients"]
    clients = there if cohort is None else min(there, cohort if isinstance(cohort, int) else round(cohort * there))
    lanes = next((m for m in parse_method(config.method).methods if isinstance(m, Astraea)), None)
    model = 4 * federation["parameters"]
    if lanes is None or lanes.gamma * lanes.mediator_epochs == 1:
        return int(2 * model * clients)
    return traffic(model, clients, lanes.gamma, lanes.mediator_epochs)


def _read(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    return content

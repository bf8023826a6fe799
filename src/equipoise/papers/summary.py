"""Summarises a run folder: the numbers of its last and best rounds, a thinned curve, and how it was executed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.core.errors import CheckpointError
from equipoise.methods import Astraea
from equipoise.methods.registry import parse
from equipoise.papers.experiment import CURVE, Experiment
from equipoise.papers.measures import MEASURES
from equipoise.papers.overhead import traffic
from equipoise.runs.baselines import CENTRALISED, LOCAL
from equipoise.runs.config import Config
from equipoise.runs.folder import read_metrics

LAST_KEYS = (
    "round", "accuracy", "balanced_accuracy", "minority_accuracy", "minority_mean", "worst_class_accuracy",
    "macro_f1", "loss", "recall",
)  # fmt: skip
BEST_KEYS = ("round", "accuracy", "balanced_accuracy", "minority_accuracy")
PLAN_KEYS = ("device", "machine", "engine", "precision", "compile_from", "together", "torch")


def summary(folder: Path, config: Config, experiment: Experiment) -> dict[str, Any]:
    """Summarise a run, finished or not, that has at least one record."""
    records, federation, plan = read_metrics(folder), _read(folder / "federation.json"), _read(folder / "plan.json")
    last, select = records[-1], config.train.select
    judge = f"validation_{select}" if f"validation_{select}" in last else select
    judged = [record for record in records if record.get(judge) is not None]
    best = max(judged, key=lambda record: record[judge], default=None)  # the first one, if several are equal
    kept = {key: value for key, value in last.items() if key in LAST_KEYS or "." in key}
    return {
        "rounds": last["round"],
        "last": kept | _method_measures(last, federation["train_counts"]),
        "best": best and {key: best.get(key) for key in BEST_KEYS},
        "bests": _running_maxima([(record["round"], record[judge]) for record in judged]),
        "curve": curve(records, experiment),
        "bytes": {"up": last.get("bytes_up"), "down": last.get("bytes_down")},
        "traffic": _traffic(config, federation),
        "execution": {key: plan[key] for key in PLAN_KEYS if key in plan},
    }


def curve(records: Sequence[Mapping[str, Any]], experiment: Experiment) -> dict[str, list[Any]]:
    """Return the metrics that the experiment's measures draw, at about `CURVE` rounds that include the last."""
    if not records:
        return {}
    stride = -(-len(records) // CURVE)
    chosen = [*records[:-1:stride], records[-1]]
    keys = ["round", *dict.fromkeys(drawn for name in experiment.measures if (drawn := MEASURES[name].curve))]
    return {key: [record[key] for record in chosen] for key in keys if chosen[-1].get(key) is not None}


def _running_maxima(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    """Return [round, value] for each value above all earlier ones, which tells when any value was first reached."""
    maxima: list[list[float]] = []
    for at, value in points:
        if not maxima or value > maxima[-1][1]:
            maxima.append([at, value])
    return maxima


def _method_measures(last: Mapping[str, Any], counts: Sequence[int]) -> dict[str, float]:
    """Return what a method measures itself, under the names that `measures.py` reads."""
    made: dict[str, float] = {}
    if "astraea.storage" in last:
        made = {"storage": last["astraea.storage"], "kld": last["astraea.kld_mediators"]}
    if "fedre.share_0" in last and all(counts):
        truth = [count / sum(counts) for count in counts]
        made["share_error"] = max(abs(last[f"fedre.share_{c}"] - true) / true for c, true in enumerate(truth))
    return made


def _traffic(config: Config, federation: Mapping[str, Any]) -> int | None:
    """Return the bytes of a round as Astraea's Section 4.3 counts them: two transfers of the model per visit."""
    if config.method in (CENTRALISED, LOCAL):
        return None
    cohort, there = config.train.cohort, federation["clients"] - federation["empty_clients"]
    clients = there if cohort is None else min(there, cohort if isinstance(cohort, int) else round(cohort * there))
    astraea = next((m for m in parse(config.method).methods if isinstance(m, Astraea)), None)
    model = 4 * federation["parameters"]
    if astraea is None or astraea.gamma * astraea.mediator_epochs == 1:
        return int(2 * model * clients)
    return traffic(model, clients, astraea.gamma, astraea.mediator_epochs)


def _read(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    return content

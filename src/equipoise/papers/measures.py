"""The measures that are compared with the papers, and how each is read from the record of a run.

A record is what `results.py` stores of a run: numbers of its last and its best round, and a curve. Some measures also
need the record of the baseline with the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from equipoise.papers.published import NEVER
from equipoise.report.markup import MISSING

Record = Mapping[str, Any]


class Measure(NamedTuple):
    title: str
    read: Callable[[Record, Record | None], float | None]  # (record, record of the baseline) -> value
    curve: str | None = None  # the metric that is drawn against rounds
    lower: bool = False  # lower values are better
    points: bool = True  # the value is a share and shown in percent


def _last(key: str) -> Callable[[Record, Record | None], float | None]:
    return lambda run, baseline: run["last"].get(key)


def _best(key: str) -> Callable[[Record, Record | None], float | None]:
    return lambda run, baseline: (run.get("best") or {}).get(key)


def _gain(run: Record, baseline: Record | None) -> float | None:
    """Return the balanced accuracy of the best round minus that of the baseline's best round."""
    pair = [_best("balanced_accuracy")(record, None) for record in (run, baseline) if record is not None]
    return pair[0] - pair[1] if len(pair) == 2 and pair[0] is not None and pair[1] is not None else None


def reached(run: Record, value: float | None) -> float | None:
    """Return the first round in which the metric that chooses the best round is at least `value`.

    Infinity means that no round reached the value, None that it is not known.
    """
    if value is None or not run.get("bests"):
        return None
    return next((float(at) for at, best in run["bests"] if best >= value), math.inf)


def _to_baseline(run: Record, baseline: Record | None) -> float | None:
    return reached(run, baseline["bests"][-1][1]) if baseline is not None and baseline.get("bests") else None


def _to_target(run: Record, baseline: Record | None) -> float | None:
    return reached(run, run.get("target"))


def _traffic(run: Record, baseline: Record | None) -> float | None:
    rounds, each = _to_target(run, None), run.get("traffic")
    return None if rounds is None or each is None else rounds * each / 1e6


MEASURES: dict[str, Measure] = {
    "minority_accuracy": Measure("minority", _last("minority_accuracy"), "minority_accuracy"),
    "accuracy": Measure("overall", _last("accuracy"), "accuracy"),
    "balanced_accuracy": Measure("balanced", _last("balanced_accuracy"), "balanced_accuracy"),
    "best_accuracy": Measure("best round", _best("accuracy"), "accuracy"),
    "best_balanced_accuracy": Measure("best round", _best("balanced_accuracy"), "balanced_accuracy"),
    "gain": Measure("gain over FedAvg", _gain, "balanced_accuracy"),
    "rounds_to_baseline": Measure("rounds to FedAvg's best", _to_baseline, "accuracy", lower=True, points=False),
    "rounds_to_target": Measure("rounds to target", _to_target, "balanced_accuracy", lower=True, points=False),
    "megabytes_to_target": Measure("MB to target", _traffic, "balanced_accuracy", lower=True, points=False),
    "kld": Measure("KLD", _last("kld"), lower=True, points=False),
    "storage": Measure("extra storage", _last("storage"), lower=True),
    "share_error": Measure("error of shares", _last("share_error"), "loss", lower=True),
}


def shown(measure: str, value: float | None, signed: bool = False) -> str:
    """Format a value of a measure.

    >>> shown("accuracy", 0.8029), shown("kld", 0.174), shown("rounds_to_target", math.inf), shown("accuracy", None)
    ('80.3', '0.174', 'never', '–')
    >>> shown("accuracy", -0.004, signed=True), shown("rounds_to_target", 4.0)
    ('-0.4', '4')
    """
    if value is None:
        return MISSING
    if math.isinf(value):
        return NEVER
    if MEASURES[measure].points:
        return f"{100 * value:{'+' if signed else ''}.1f}"
    digits = ".0f" if abs(value) >= 10 or (value and value == round(value)) else ".3f"
    return f"{value:{'+' if signed else ''}{digits}}"

"""Measures read from the record of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from equipoise.papers.measures import MEASURES, reached

RUN: dict[str, Any] = {
    "last": {"accuracy": 0.7, "minority_accuracy": 0.2, "kld": 0.3},
    "best": {"accuracy": 0.75, "balanced_accuracy": 0.72},
    "bests": [[1, 0.3], [4, 0.5], [9, 0.75]],
    "traffic": 2_000_000,
}
BASELINE: dict[str, Any] = {"last": {}, "best": {"accuracy": 0.6, "balanced_accuracy": 0.6}, "bests": [[2, 0.5]]}


@pytest.mark.parametrize(
    ("measure", "value"),
    [
        ("accuracy", 0.7), ("minority_accuracy", 0.2), ("balanced_accuracy", None), ("best_accuracy", 0.75),
        ("gain", pytest.approx(0.12)), ("rounds_to_baseline", 4.0), ("kld", 0.3), ("storage", None),
    ],
)  # fmt: skip
def test_measures_are_read_off_a_run(measure: str, value: float | None) -> None:
    assert MEASURES[measure].read(RUN, BASELINE) == value


def test_what_needs_a_baseline_is_unknown_without_one() -> None:
    assert MEASURES["gain"].read(RUN, None) is None
    assert MEASURES["rounds_to_baseline"].read(RUN, None) is None


def test_traffic_counts_the_rounds_to_the_target() -> None:
    assert MEASURES["megabytes_to_target"].read(RUN | {"target": 0.6}, None) == 18.0
    assert MEASURES["megabytes_to_target"].read(RUN | {"target": 0.9}, None) == math.inf
    assert MEASURES["rounds_to_target"].read(RUN, None) is None


def test_a_value_is_reached_in_the_first_round_that_has_it() -> None:
    assert reached(RUN, 0.3) == 1
    assert reached(RUN, 0.31) == 4
    assert reached({"bests": []}, 0.3) is None


def test_a_failed_run_has_no_values() -> None:
    for name, measure in MEASURES.items():
        assert measure.read({"last": {}}, BASELINE) is None, name

"""The published numbers, and how one is found."""

from __future__ import annotations

import csv
import math
from importlib.resources import files

from equipoise.papers.published import Published


def test_a_value_is_found_whichever_way_its_cell_is_written() -> None:
    table = {"file": "climb_table2.csv", "columns": {"rho": "imbalance_ratio", "minority": "minority_classes"}}
    published = Published.read(table, ["dataset", "rho", "minority", "alpha", "nowhere"])
    cell = [("dataset", "mnist"), ("rho", "10"), ("minority", "3"), ("alpha", "0"), ("nowhere", "1")]
    assert published.value(cell, "fedavg", "overall_accuracy") == 0.7133
    assert published.value([*cell[:1], ("rho", "7"), *cell[2:]], "fedavg", "overall_accuracy") is None
    assert published.value(cell, "scaffold", "overall_accuracy") is None


def test_never_is_infinite() -> None:
    published = Published.read({"file": "fedshift_table2.csv"}, ["dataset"])
    assert published.value([("dataset", "cifar10")], "scaffold", "rounds_to_fedavg_accuracy") == math.inf
    assert published.value([("dataset", "cifar10")], "fedshift", "rounds_to_fedavg_accuracy") == 23


def test_a_value_may_stand_for_another() -> None:
    published = Published.read({"file": "astraea_fig8.csv", "same": {"part": "emnist"}}, ["dataset", "gamma"])
    assert published.value([("dataset", "part"), ("gamma", "10")], "both", "kld") == 0.174
    assert published.value([("dataset", "other"), ("gamma", "10")], "both", "kld") is None


def test_every_table_is_whole() -> None:
    tables = [
        entry for entry in files("equipoise.papers").joinpath("tables").iterdir() if entry.name.endswith(".csv")
    ]
    assert len(tables) >= 17
    for table in tables:
        rows = list(csv.DictReader(table.read_text().splitlines()))
        assert rows, table.name
        for row in rows:
            assert all(row.values()), (table.name, row)
            assert "method" in row

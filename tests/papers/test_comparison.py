"""Paper and rerun compared: means, ranges, differences and ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.papers import Cell, choose, find
from equipoise.papers.comparison import Block, block, blocks, progress
from equipoise.papers.results import CellResults
from equipoise.papers.standing import standings
from equipoise.report.markup import MISSING

KEPT = Path(__file__).parent / "results"  # thirty rounds of FedAvg and CLIMB on MNIST
TABLE = find("climb-table2")


def run(method: str, seed: int, minority: float, overall: float, rounds: int = 1000) -> dict[str, Any]:
    last = {"minority_accuracy": minority, "accuracy": overall}
    expression = TABLE.settings(cell(), method)["method"]
    return {"method": method, "expression": expression, "changes": {}, "seed": seed, "rounds": rounds, "last": last}


def cell(alpha: str = "0") -> Cell:
    return choose(TABLE, [f"dataset=mnist,rho=10,minority=3,alpha={alpha}"])[0]


def made(*runs: dict[str, Any], alpha: str = "0") -> Block:
    return block(TABLE, CellResults(TABLE.name, cell(alpha), (), {}, runs))


def test_mean_range_difference_and_ranks_of_a_cell() -> None:
    one = made(
        run("fedavg", 0, 0.01, 0.72), run("fedavg", 1, 0.03, 0.74), run("climb", 0, 0.80, 0.91),
        run("ratio_loss", 0, 0.05, 0.70), run("climb_fedshift", 0, 0.03, 0.95),
    )  # fmt: skip
    rows = {row.method: row for row in one.rows}
    assert list(rows) == ["fedavg", "climb", "ratio_loss", "focal_loss", "climb_fedshift"]
    value = rows["fedavg"].values["minority_accuracy"]
    assert (value.paper, value.mean, value.low, value.high) == (0.0153, pytest.approx(0.02), 0.01, 0.03)
    assert value.difference == pytest.approx(0.0047)
    assert (value.paper_rank, value.rank) == (4, 3)
    words = rows["climb"].values["minority_accuracy"].words("minority_accuracy")
    assert words == ["80.3", "80.0", "", "-0.3", "1 → 1"]
    assert rows["focal_loss"].values["accuracy"].words("accuracy") == ["74.0", MISSING, "", "", "2"]
    extra = rows["climb_fedshift"].values["minority_accuracy"]
    assert (extra.paper, extra.paper_rank, extra.rank) == (None, None, 3)
    assert rows["climb_fedshift"].name == "climb_fedshift +"


def test_the_number_of_rounds_is_shown_if_it_is_smaller_than_in_the_paper() -> None:
    one = made(run("fedavg", 0, 0.0, 0.5, 30), run("climb", 0, 0.1, 0.5, 400), run("climb", 1, 0.8, 0.9, 1000))
    fedavg, climb, ratio, _ = one.rows
    assert [one.length(row) for row in (fedavg, climb, ratio)] == ["30 of 1,000", "1,000", "not run"]
    assert len(climb.runs) == 1  # the one with all rounds of the paper
    assert not one.complete
    some = made(run("climb", 0, 0.1, 0.5, 400), run("climb", 1, 0.1, 0.5, 300) | {"failed": "not a number"})
    assert some.length(some.rows[1]) == "300 to 400 of 1,000 (failed)"


def test_cells_are_shown_in_order_including_those_not_run() -> None:
    found = blocks(TABLE, KEPT)
    assert [one.cell for one in found] == TABLE.cells()
    (one,) = [one for one in found if one.has_runs]
    assert str(one.cell) == "dataset=mnist,rho=10,minority=3,alpha=0"
    assert [len(row.runs) for row in one.rows] == [1, 1, 0, 0]
    assert progress(TABLE, KEPT) == (24, 0, 1)


def test_a_complete_cell_has_every_method_of_the_paper() -> None:
    runs = [run(method, 0, 0.5, 0.5) for method in TABLE.methods]
    assert made(*runs).complete
    assert not made(*runs[1:]).complete


def test_ranks_if_lower_is_better() -> None:
    fig8 = find("astraea-fig8")
    (here,) = choose(fig8, ["dataset=emnist_part,online=50,gamma=10"])

    def entry(method: str, kld: float) -> dict[str, Any]:
        base = {"method": method, "expression": "", "changes": {}, "seed": 0, "rounds": 20}
        return base | {"last": {"kld": kld, "storage": 0.0}}

    one = block(fig8, CellResults(fig8.name, here, (), {}, (entry("fedavg", 0.5), entry("both", 0.2))))
    ranks = {row.method: row.values["kld"].rank for row in one.rows}
    assert ranks == {"fedavg": 2, "augmentation": None, "mediators": None, "both": 1}
    assert [(entry.method, entry.best) for entry in standings([one], "kld")] == [("fedavg", 0), ("both", 1)]


def test_runs_made_with_other_settings_are_shown_apart(tmp_path: Path) -> None:
    kept = json.loads(next((KEPT / TABLE.name).glob("*.json")).read_text())
    kept["settings"]["local"]["lr"] = 0.3
    (tmp_path / TABLE.name).mkdir()
    (tmp_path / TABLE.name / "old.json").write_text(json.dumps(kept))
    now, before = blocks(TABLE, tmp_path, [cell()])
    assert (now.has_runs, before.has_runs) == (False, True)
    assert before.title == "dataset=mnist,rho=10,minority=3,alpha=0 with local.lr = 0.3, now 0.05"

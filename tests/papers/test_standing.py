"""How methods do over several cells: differences from the paper, first ranks, and ties."""

from __future__ import annotations

import pytest

from equipoise.papers.standing import standings
from tests.papers.test_comparison import made, run


def test_agreement_over_cells() -> None:
    cells = [
        made(run("fedavg", 0, 0.1, 0.7133), run("climb", 0, 0.9, 0.90), run("climb", 1, 0.7, 0.90)),
        made(run("fedavg", 0, 0.75, 0.9289), run("climb", 0, 0.80, 0.92), run("climb", 1, 0.74, 0.92), alpha="0.1"),
        made(run("climb", 0, 0.1, 0.1, rounds=30), alpha="0.2"),  # too short to be compared
    ]
    fedavg, climb = standings(cells, "accuracy")
    assert (fedavg.method, fedavg.compared, fedavg.difference) == ("fedavg", 2, pytest.approx(0.005))
    assert (fedavg.first, climb.first_in_paper, climb.first, climb.contests) == (1, 2, 1, 2)
    fedavg, climb = standings(cells, "minority_accuracy")
    assert (climb.first, climb.best) == (2, 2)
    assert (fedavg.first, fedavg.best) == (0, 1)  # its one seed lies among CLIMB's: tied


def test_methods_beyond_the_paper_count_among_the_best_only() -> None:
    one = made(run("fedavg", 0, 0.1, 0.7), run("climb", 0, 0.8, 0.9), run("climb_fast", 0, 0.9, 0.9))
    entries = {entry.method: entry for entry in standings([one], "minority_accuracy")}
    assert (entries["climb"].first, entries["climb"].best) == (1, 0)
    assert (entries["climb_fast +"].first, entries["climb_fast +"].best) == (0, 1)
    assert entries["climb_fast +"].difference is None


def test_single_seeds_tie_when_they_are_close() -> None:
    near = standings([made(run("fedavg", 0, 0.500, 0.5), run("climb", 0, 0.504, 0.5))], "minority_accuracy")
    assert [entry.best for entry in near] == [1, 1]
    far = standings([made(run("fedavg", 0, 0.500, 0.5), run("climb", 0, 0.506, 0.5))], "minority_accuracy")
    assert [entry.best for entry in far] == [0, 1]
    alone = standings([made(run("climb", 0, 0.5, 0.5))], "minority_accuracy")
    assert [(entry.best, entry.contests) for entry in alone] == [(0, 0)]

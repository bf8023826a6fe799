"""Experiments as data: every cell is a valid config, and every published number has a cell."""

from __future__ import annotations

import pytest

from equipoise.core.errors import ConfigError
from equipoise.data import SOURCES
from equipoise.methods.registry import parse
from equipoise.papers import Cell, choose, experiments, find
from equipoise.papers.measures import MEASURES
from equipoise.papers.synthetic import POINTS
from equipoise.runs.baselines import CENTRALISED, LOCAL
from equipoise.runs.config import Config
from tests.papers import toy


@pytest.mark.parametrize("name", experiments())
def test_every_cell_and_method_is_a_run(name: str) -> None:
    experiment = find(name)
    assert set(experiment.measures) <= set(MEASURES)
    assert all(guess.what and guess.value and guess.evidence for guess in experiment.guesses)
    assert experiment.methods
    for cell in experiment.cells():
        for method in (*experiment.methods, *experiment.extra):
            settings = experiment.settings(cell, method)
            assert experiment.rounds(cell) == settings["train"]["rounds"]
            if experiment.kind == "estimate":
                assert settings["points"] in POINTS
                continue
            config = Config.from_dict(settings)
            assert config.data.source in SOURCES
            if config.method not in (CENTRALISED, LOCAL):
                assert parse(config.method) is not None


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("climb-table1", 64, 2), ("climb-table2", 96, 2), ("fedshift-table1", 15, 1), ("fedshift-table2", 12, 1),
        ("fedshift-table3", 16, 1), ("fedshift-table4", 16, 1), ("fedshift-table5", 12, 1), ("fedre-table2", 32, 2),
        ("fedre-table3", 32, 2), ("fedre-figures", 3, 1), ("astraea-fig2", 10, 1), ("astraea-fig5", 6, 1),
        ("astraea-fig6", 2, 1), ("astraea-fig7", 2, 1), ("astraea-fig8", 4, 1), ("astraea-fig10", 3, 1),
        ("astraea-table3", 15, 1), ("climb-appendix-dirichlet", 0, 1), ("climb-appendix-fashion", 0, 1),
        ("astraea-fig9", 0, 1),
    ],
)  # fmt: skip
def test_every_published_number_finds_its_cell(name: str, rows: int, columns: int) -> None:
    """`rows` counts a row twice if both EMNIST and its test part use its numbers."""
    experiment = find(name)
    found = sum(
        experiment.printed(cell, method, measure) is not None
        for cell in experiment.cells()
        for method in experiment.methods
        for measure in experiment.measures
    )
    assert found == rows * columns


def test_the_hard_cell_of_climb() -> None:
    experiment = find("climb-table2")
    (cell,) = choose(experiment, ["dataset=mnist,rho=10,alpha=0.0,minority=3"])
    assert str(cell) == "dataset=mnist,rho=10,minority=3,alpha=0"
    config = Config.from_dict(experiment.settings(cell, "climb"))
    assert config.method == "climb(preset='mnist')"
    assert config.data.imbalance.minority == (0, 2, 4)
    assert config.data.imbalance.joint
    assert (config.data.partition.clients, config.data.partition.alpha) == (100, 0.0)
    assert (config.train.rounds, config.local.steps_per_epoch, config.local.clip) == (1000, 5, 5.0)
    assert experiment.printed(cell, "climb", "minority_accuracy") == 0.8029
    assert experiment.printed(cell, "climb", "accuracy") == 0.9115


def test_the_federations_of_astraea_differ_as_its_table_1_says() -> None:
    experiment = find("astraea-fig2")
    made = {
        dict(cell.values)["federation"]: Config.from_dict(experiment.settings(cell, "fedavg")).data
        for cell in choose(experiment, ["dataset=emnist"])
    }
    assert list(made) == ["BAL1", "BAL2", "INS", "LTRF1", "LTRF2"]
    assert type(made["BAL1"].partition) is not type(made["BAL2"].partition)
    assert (made["BAL2"].partition.sizes, made["INS"].partition.sizes) == ("equal", "lognormal")
    assert made["INS"].imbalance != made["LTRF1"].imbalance
    assert made["LTRF2"].imbalance.total / made["LTRF1"].imbalance.total == pytest.approx(2, abs=0.05)
    assert {data.partition.clients for data in made.values()} == {500}


def test_fragments_words_and_methods_of_a_cell() -> None:
    first, second = toy.experiments()
    assert [str(cell) for cell in first.cells()] == [
        *("split=even,rho=2", "split=even,rho=4", "split=skewed,rho=2", "split=skewed,rho=4")
    ]
    even, skewed = first.cells()[0], first.cells()[2]
    assert first.settings(even, "prox")["method"] == "fedprox(mu=0.1)"
    assert first.settings(skewed, "prox")["method"] == "fedprox(mu=0.5)"
    assert first.settings(even, "pair")["train"]["cohort"] == 3
    assert first.settings(skewed, "pair")["train"]["cohort"] == 2
    assert first.settings(skewed)["data"]["partition"] == {"kind": "dirichlet", "clients": 4, "alpha": 1.0}
    assert first.settings(even, "fedprox(mu=2)")["method"] == "fedprox(mu=2)"
    assert first.changes(even, "pair") == {"train.cohort": 3}
    assert (first.departures, second.departures) == (("a departure",), ())


def test_a_shorter_run_is_evaluated_more_often() -> None:
    experiment = find("climb-table2")
    cell = experiment.cells()[0]
    assert experiment.settings(cell)["train"]["evaluate_every"] == 20
    assert experiment.settings(cell, sets=["train.rounds=30"])["train"]["evaluate_every"] == 1
    given = ["train.rounds=30", "train.evaluate_every=7"]
    assert experiment.settings(cell, sets=given)["train"]["evaluate_every"] == 7


def test_cells_are_chosen_by_axes_in_any_order() -> None:
    first, _ = toy.experiments()
    assert choose(first, []) == first.cells()
    assert choose(first, ["rho=4.0,split=even"]) == [Cell((("split", "even"), ("rho", "4")))]
    assert len(choose(first, ["rho=2", "split=even"])) == 3


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("roh=2", "no axis 'roh'; did you mean 'rho'"),
        ("rho=3", "rho = '3', expected one of 2, 4"),
        ("rho", "expected axes and values such as split=even,rho=2"),
    ],
)
def test_a_wrong_cell_is_one_sentence(wanted: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose(toy.experiments()[0], [wanted])
    assert sentence in str(error.value)


def test_a_wrong_name_or_word_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="did you mean 'climb-table2'"):
        find("climb-tabel2")
    first, _ = toy.experiments()
    with pytest.raises(ConfigError, match="knows only the words split, rho, mu"):
        first.settings(first.cells()[0], "fedprox(mu={nu})")

"""Which runs an experiment needs, in which folders, and which runs of two tables are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipoise.core.errors import ConfigError
from equipoise.methods.registry import parse
from equipoise.papers import find
from equipoise.papers.experiment import slug
from equipoise.papers.jobs import Job, identity, plan, variant
from tests.papers import toy


def test_a_cell_is_planned_whole_before_the_next() -> None:
    first, _ = toy.experiments()
    jobs = plan(first, first.cells()[:2], ["fedavg", "prox"], seeds=2)
    assert [(str(job.cell)[-1], job.seed, job.method) for job in jobs] == [
        ("2", 0, "fedavg"), ("2", 0, "prox"), ("2", 1, "fedavg"), ("2", 1, "prox"),
        ("4", 0, "fedavg"), ("4", 0, "prox"), ("4", 1, "fedavg"), ("4", 1, "prox"),
    ]  # fmt: skip


def test_a_method_may_be_given_by_its_expression() -> None:
    experiment = find("climb-table2")
    jobs = plan(experiment, experiment.cells()[:1], ["climb(preset='mnist')", "focal(gamma=1)", "climb"], seeds=1)
    assert [job.method for job in jobs] == ["climb", "focal(gamma=1)"]
    assert [job.expression for job in jobs] == ["climb(preset='mnist')", "focal(gamma=1)"]


def test_a_method_may_be_one_of_anybodys() -> None:
    first, _ = toy.experiments()
    (job,) = plan(first, first.cells()[:1], ["tests.toys:Visits + climb"], seeds=1)
    assert [method.name for method in parse(job.config.method)] == ["visits", "climb"]
    assert job.folder(Path("out")).parts[-2] == "tests.toys_Visits_climb"


def test_an_invalid_job_is_refused_before_anything_runs() -> None:
    first, _ = toy.experiments()
    with pytest.raises(ConfigError, match="did you mean 'fedprox'"):
        plan(first, first.cells(), ["fedpox"], seeds=1)
    with pytest.raises(ConfigError, match=r"local\.lr = -1"):
        plan(first, first.cells(), ["fedavg"], seeds=1, sets=["local.lr=-1"])
    with pytest.raises(ConfigError, match="--seeds 0"):
        plan(first, first.cells(), ["fedavg"], seeds=0)
    figures = find("fedre-figures")
    with pytest.raises(ConfigError, match="layers=1, layers=2"):
        plan(figures, figures.cells(), ["fedavg"], seeds=1)


def test_every_run_has_its_own_folder() -> None:
    first, _ = toy.experiments()
    cell, out = first.cells()[0], Path("out")
    base = out / "toy-first" / "split=even_rho=2"
    assert Job(first, cell, "prox", 1).folder(out) == base / "prox" / "seed-1"
    assert Job(first, cell, "prox", 1, ("train.rounds=2",)).folder(out) == base / "prox" / "rounds-2" / "seed-1"
    assert Job(first, cell, "prox", 1, ("train.device=cpu",)).folder(out) == base / "prox" / "seed-1"
    other = Job(first, cell, "prox", 1, ("local.lr=0.2",)).folder(out)
    assert other == out / "toy-first" / "split=even_rho=2@local.lr=0.2" / "prox" / "seed-1"


def test_long_names_are_cut_and_stay_different() -> None:
    long, other = (slug("data.imbalance={counts=[" + "1," * 60 + end) for end in ("3]}", "4]}"))
    assert len(long) == len(other) == 80
    assert long != other


def test_execution_settings_make_no_variant() -> None:
    assert variant(["train.precision=tf32", "train.rounds=3", "data.dir=/x"]) == ()
    assert variant(["local.lr = 1", "data.partition.alpha=2"]) == ("data.partition.alpha=2", "local.lr=1")


def test_a_set_overrides_what_a_method_changes() -> None:
    first, _ = toy.experiments()
    assert Job(first, first.cells()[0], "pair", 0).changes == {"train.cohort": 3}
    job = Job(first, first.cells()[0], "pair", 0, ("train.cohort=4",))
    assert (job.changes, job.config.train.cohort) == ({}, 4)


def test_runs_of_two_tables_are_the_same_run() -> None:
    first, second = toy.experiments()
    mine, other = Job(first, first.cells()[1], "prox", 0), Job(second, second.cells()[0], "prox", 0)
    assert identity(mine.settings) == identity(other.settings)
    assert identity(mine.settings) == identity(Job(first, mine.cell, "prox", 0, ("train.rounds=9",)).settings)
    assert identity(mine.settings) != identity(Job(first, first.cells()[0], "prox", 0).settings)


def test_tables_of_the_papers_share_their_common_cell() -> None:
    """FedShift's tables share its default setting, and Astraea's figures share theirs."""

    def of(name: str, cells: dict[str, str], method: str) -> str:
        experiment = find(name)
        cell = next(cell for cell in experiment.cells() if cells.items() <= dict(cell.values).items())
        return identity(Job(experiment, cell, method, 0).settings)

    default = of("fedshift-table1", {"dataset": "cifar10"}, "fedprox")
    assert default == of("fedshift-table2", {"dataset": "cifar10"}, "fedprox")
    assert default == of("fedshift-table3", {"epochs": "5"}, "fedprox")
    assert default == of("fedshift-table4", {"alpha": "0.1"}, "fedprox")
    both = of("astraea-fig5", {"dataset": "emnist_part"}, "both")
    assert both == of("astraea-table3", {"dataset": "emnist_part"}, "Em=2")
    assert both == of("astraea-fig10", {"dataset": "emnist_part"}, "tau_d=3.5")
    assert both == of("astraea-fig7", {"dataset": "emnist_part", "online": "50", "gamma": "10"}, "astraea")

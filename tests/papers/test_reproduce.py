"""Experiments rerun: which runs are missing, resumed, shared, stopped and stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from equipoise.core.errors import ConfigError, DataError, TrainingError
from equipoise.papers import Experiment, find, results, runner
from equipoise.papers import reproduce as reproduce_module
from equipoise.papers.experiment import merge
from equipoise.papers.jobs import Job, plan
from equipoise.papers.reproduce import reproduce, seconds
from equipoise.runs import run as runs
from equipoise.runs.run import Watch
from tests.papers import toy


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> tuple[Experiment, Experiment]:
    made = toy.experiments()
    monkeypatch.setattr(reproduce_module, "experiments", lambda: {experiment.name: experiment for experiment in made})
    return made


def done(jobs: list[Job], root: Path, watch: Watch = Watch(), deadline: float | None = None) -> list[tuple[str, int]]:
    todo = list(results.missing(jobs, root / "results"))
    kept = reproduce(todo, root / "runs", root / "results", watch, command="equipoise ...", deadline=deadline)
    return [(job.method, run["rounds"]) for job, run in kept]


def test_a_cell_is_run_and_kept(tables: tuple[Experiment, Experiment], tmp_path: Path) -> None:
    first, _ = tables
    cell = first.cells()[0]
    jobs = plan(first, [cell], ["fedavg", "prox", "pair"], seeds=1)
    assert done(jobs, tmp_path) == [("fedavg", 4), ("prox", 4), ("pair", 4)]
    run = results.read(tmp_path / "results", first, cell).run("pair", 0)
    assert run is not None
    assert run["changes"] == {"train.cohort": 3}
    assert run["curve"]["round"] == [1, 2, 3, 4]
    assert run["curve"]["accuracy"][-1] == run["last"]["accuracy"]
    assert len(run["last"]["recall"]) == 10
    assert run["best"]["balanced_accuracy"] == max(value for _, value in run["bests"])
    assert run["traffic"] == 2 * 4 * 650 * 3
    assert run["made"]["command"] == "equipoise ..."
    assert run["execution"]["device"] == "cpu"
    assert run["seconds"] > 0
    assert done(jobs, tmp_path) == []


def test_a_run_of_another_table_is_not_repeated(tables: tuple[Experiment, Experiment], tmp_path: Path) -> None:
    first, second = tables
    done(plan(first, first.cells()[1:2], ["fedavg", "prox"], seeds=1), tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("nothing is to be trained")

    assert done(plan(second, second.cells(), ["fedavg", "prox"], seeds=1), tmp_path, Watch(begin=refuse)) == [
        ("fedavg", 4),
        ("prox", 4),
    ]
    longer = plan(second, second.cells(), ["fedavg"], seeds=1, sets=["train.rounds=5"])
    assert done(longer, tmp_path) == [("fedavg", 5)]


def test_a_budget_stops_the_current_run_which_is_resumed_later(
    tables: tuple[Experiment, Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = tables
    jobs = plan(first, first.cells()[:1], ["fedavg", "prox"], seeds=1)
    begun: list[int] = []
    clock = [0.0]  # the first round takes an hour
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    late = Watch(begin=lambda config, fed, at: begun.append(at), step=lambda step: clock.append(clock.pop() + 3600))
    assert done(jobs, tmp_path, late, deadline=600.0) == [("fedavg", 2)]
    partial = results.read(tmp_path / "results", first, jobs[0].cell).run("fedavg", 0)
    assert partial is not None
    assert (partial["rounds"], partial["asked"], partial["seconds"]) == (2, 4, 7200.0)
    assert done(jobs, tmp_path, late) == [("fedavg", 4), ("prox", 4)]
    assert begun == [0, 2, 0]
    whole = results.read(tmp_path / "results", first, jobs[0].cell).run("fedavg", 0)
    assert whole is not None
    assert whole["curve"]["round"] == [1, 2, 3, 4]
    assert whole["seconds"] == 4 * 3600
    more = plan(first, first.cells()[1:2], ["fedavg"], seeds=1)
    assert done(more, tmp_path, late, deadline=600.0) == []


def test_a_stopped_run_ends_like_an_uninterrupted_one(tables: tuple[Experiment, Experiment], tmp_path: Path) -> None:
    first, _ = tables
    (job,) = plan(first, first.cells()[:1], ["fedavg"], seeds=1)
    folder = tmp_path / "stopped"
    with pytest.raises(runs.Stopped, match="after round 1"):
        runs.run(job.config, folder, Watch(stop=lambda: True))
    stopped, whole = runs.resume(folder), runs.run(job.config, tmp_path / "whole")
    assert stopped["last"]["confusion"] == whole["last"]["confusion"]
    assert stopped["last"]["loss"] == whole["last"]["loss"]


def test_a_failed_run_does_not_stop_the_others(
    tables: tuple[Experiment, Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = tables
    run_or_resume = runner.run_or_resume

    def fail(config: object, folder: Path, watch: Watch, seat: object) -> object:
        if "prox" in str(folder):
            raise TrainingError("not a number")
        return run_or_resume(config, folder, watch, seat)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "run_or_resume", fail)
    jobs = plan(first, first.cells()[:1], ["prox", "fedavg"], seeds=1)
    assert done(jobs, tmp_path) == [("prox", 0), ("fedavg", 4)]
    run = results.read(tmp_path / "results", first, jobs[0].cell).run("prox", 0)
    assert run is not None
    assert run["failed"] == "not a number"
    assert list(results.missing(jobs, tmp_path / "results")) == [jobs[0]]


def test_another_setting_is_stored_apart(tables: tuple[Experiment, Experiment], tmp_path: Path) -> None:
    first, _ = tables
    cell = first.cells()[0]
    jobs = plan(first, [cell], ["fedavg"], seeds=1, sets=["local.lr=0.2", "train.rounds=2"])
    assert done(jobs, tmp_path) == [("fedavg", 2)]
    assert results.read(tmp_path / "results", first, cell).runs == ()
    assert results.read(tmp_path / "results", first, cell, ("local.lr=0.2",)).runs


def test_estimates_need_no_run_folder(tmp_path: Path) -> None:
    figures = find("fedre-figures")
    cell = next(cell for cell in figures.cells() if str(cell) == "figure=4")
    jobs = plan(figures, [cell], ["layers=1", "layers=3"], seeds=1, sets=["train.rounds=300"])
    assert done(jobs, tmp_path) == [("layers=1", 300), ("layers=3", 300)]
    shallow, deep = (results.read(tmp_path / "results", figures, cell).runs_of(job.method)[0] for job in jobs)
    assert shallow["last"]["share_error"] > 0.3 > 0.05 > deep["last"]["share_error"]
    assert shallow["curve"]["loss"][0] > shallow["curve"]["loss"][-1]
    assert not (tmp_path / "runs").exists()


def test_balance_is_measured_without_training(tmp_path: Path) -> None:
    first, _ = toy.experiments()
    fig8 = find("astraea-fig8")
    skewed = first.settings(first.cells()[2])
    small = replace(
        fig8,
        base=(merge(skewed, {"train": {"rounds": 2, "cohort": 4}, "model": {"name": "logistic"}}),),
        axes={"gamma": {"2": {}}},
    )
    jobs = plan(small, small.cells(), ["fedavg", "mediators"], seeds=1)
    done(jobs, tmp_path)
    kept = results.read(tmp_path / "results", small, small.cells()[0])
    alone, grouped = (kept.runs_of(method)[0]["last"] for method in ("fedavg", "mediators"))
    assert alone["kld"] == alone["kld_clients"] > grouped["kld"] > 0
    assert grouped["storage"] == 0


def test_a_cell_for_another_data_set_is_refused(tables: tuple[Experiment, Experiment], tmp_path: Path) -> None:
    first, _ = tables
    wrong = replace(first, base=(*first.base, {"let": {"samples": 5}}))
    with pytest.raises(
        DataError, match="expected a data set of 5 training samples, and the digits at hand has 1,438"
    ):
        done(plan(wrong, wrong.cells()[:1], ["fedavg"], seeds=1), tmp_path)


def test_budgets() -> None:
    assert (seconds("10m"), seconds("1h30m5s"), seconds("2.5")) == (600.0, 5405.0, 2.5)
    for wrong in ("", "ten", "5d", "m", "1m1h"):
        with pytest.raises(ConfigError, match="--budget"):
            seconds(wrong)

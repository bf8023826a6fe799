"""Jobs executed at the same time: the record of each is the same as if it ran alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from equipoise.core.errors import TrainingError
from equipoise.papers import find, runner
from equipoise.papers.jobs import Job, plan
from equipoise.papers.runner import run_jobs
from equipoise.runs.run import Watch
from tests.papers import toy


def jobs(methods: list[str], seeds: int = 2) -> list[Job]:
    first, _ = toy.experiments()
    return plan(first, first.cells()[:2], methods, seeds, sets=["train.precision=float64"])


def test_jobs_at_the_same_time_have_the_records_that_they_have_alone(tmp_path: Path) -> None:
    todo = jobs(["fedavg", "pair"])
    alone = dict(run_jobs(todo, tmp_path / "alone", Watch()))
    both = dict(run_jobs(todo, tmp_path / "both", Watch(), None, lambda config: 3))
    assert both.keys() == alone.keys() == set(todo)
    for job, run in both.items():
        other = alone[job]
        assert run["last"]["recall"] == other["last"]["recall"]
        assert run["curve"]["round"] == other["curve"]["round"] == [1, 2, 3, 4]
        assert (run["method"], run["seed"]) == (job.method, job.seed)
        assert other["execution"]["together"] == 1
    assert sorted(run["execution"]["together"] for run in both.values()) == [2] * 8


def test_the_time_of_a_group_is_divided_among_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    slow = Watch(step=lambda step: clock.append(clock.pop() + 10))
    found = run_jobs(jobs(["fedavg"], seeds=1), tmp_path, slow, None, lambda config: 2)
    assert [run["seconds"] for _, run in found] == [35.0, 40.0]


def test_jobs_stop_at_the_deadline_and_are_resumed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    slow = Watch(step=lambda step: clock.append(clock.pop() + 10))
    todo = jobs(["fedavg"])
    stopped = list(run_jobs(todo, tmp_path, slow, 25.0, lambda config: 2))
    assert [(job, run["rounds"]) for job, run in stopped] == [(todo[1], 2), (todo[0], 3)]
    said: list[str] = []
    resumed = list(run_jobs(todo, tmp_path, Watch(notify=said.append), None, lambda config: 4))
    assert [run["rounds"] for _, run in resumed] == [4, 4, 4, 4]
    assert (
        said
        == ["together 2 is now 4: the result equals that of an uninterrupted run up to rounding, not bit by bit"] * 2
    )


def test_a_failed_job_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo, run_or_resume = jobs(["fedavg"], seeds=1), runner.run_or_resume

    def fail(config: object, folder: Path, watch: Watch, seat: object) -> object:
        if folder == todo[0].folder(tmp_path):
            raise TrainingError("not a number")
        return run_or_resume(config, folder, watch, seat)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "run_or_resume", fail)
    failed, good = run_jobs(todo, tmp_path, Watch(), None, lambda config: 2)
    assert (failed[1]["rounds"], failed[1]["failed"]) == (0, "not a number")
    assert good[1]["rounds"] == 4
    assert "failed" not in good[1]


def test_a_job_without_training_runs_alone(tmp_path: Path) -> None:
    figures = find("fedre-figures")
    cells = [cell for cell in figures.cells() if str(cell) == "figure=4"]
    todo = plan(figures, cells, ["layers=1", "layers=3"], seeds=1, sets=["train.rounds=20"])
    found = run_jobs(todo, tmp_path, Watch(), None, lambda config: 9)
    assert [job.method for job, _ in found] == ["layers=1", "layers=3"]

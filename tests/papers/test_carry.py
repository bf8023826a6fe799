"""Jobs carried out at once: what is kept of each is what is kept of it alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from equipoise.errors import TrainingError
from equipoise.papers import carry, find
from equipoise.papers.carry import carried_out
from equipoise.papers.jobs import Job, plan
from equipoise.runs import Watch
from tests.papers import toy


def jobs(methods: list[str], seeds: int = 2) -> list[Job]:
    first, _ = toy.experiments()
    return plan(first, first.cells()[:2], methods, seeds, sets=["train.precision=float64"])


def test_jobs_at_once_keep_what_they_keep_alone(tmp_path: Path) -> None:
    todo = jobs(["fedavg", "pair"])
    alone = dict(carried_out(todo, tmp_path / "alone", Watch()))
    both = dict(carried_out(todo, tmp_path / "both", Watch(), None, lambda config: 3))
    assert both.keys() == alone.keys() == set(todo)
    for job, run in both.items():
        other = alone[job]
        assert run["last"]["recall"] == other["last"]["recall"]
        assert run["curve"]["round"] == other["curve"]["round"] == [1, 2, 3, 4]
        assert (run["method"], run["seed"]) == (job.method, job.seed)
        assert other["execution"]["together"] == 1
    assert sorted(run["execution"]["together"] for run in both.values()) == [2] * 8


def test_each_has_its_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(carry, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    slow = Watch(step=lambda step: clock.append(clock.pop() + 10))
    found = carried_out(jobs(["fedavg"], seeds=1), tmp_path, slow, None, lambda config: 2)
    assert [run["seconds"] for _, run in found] == [35.0, 40.0]


def test_at_the_deadline_all_stop_and_go_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(carry, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    slow = Watch(step=lambda step: clock.append(clock.pop() + 10))
    todo = jobs(["fedavg"])
    stopped = list(carried_out(todo, tmp_path, slow, 25.0, lambda config: 2))
    assert [(job, run["rounds"]) for job, run in stopped] == [(todo[1], 2), (todo[0], 3)]
    said: list[str] = []
    resumed = list(carried_out(todo, tmp_path, Watch(say=said.append), None, lambda config: 4))
    assert [run["rounds"] for _, run in resumed] == [4, 4, 4, 4]
    assert said == ["together 2 is now 4: the result agrees with the uncut run to tolerance, not bit by bit"] * 2


def test_a_job_that_fails_is_noted_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo, carry_on = jobs(["fedavg"], seeds=1), carry.carry_on

    def fail(config: object, folder: Path, watch: Watch, seat: object) -> object:
        if folder == todo[0].folder(tmp_path):
            raise TrainingError("not a number")
        return carry_on(config, folder, watch, seat)  # type: ignore[arg-type]

    monkeypatch.setattr(carry, "carry_on", fail)
    failed, good = carried_out(todo, tmp_path, Watch(), None, lambda config: 2)
    assert (failed[1]["rounds"], failed[1]["failed"]) == (0, "not a number")
    assert good[1]["rounds"] == 4
    assert "failed" not in good[1]


def test_what_is_not_trained_goes_alone(tmp_path: Path) -> None:
    figures = find("fedre-figures")
    cells = [cell for cell in figures.cells() if str(cell) == "figure=4"]
    todo = plan(figures, cells, ["layers=1", "layers=3"], seeds=1, sets=["train.rounds=20"])
    found = carried_out(todo, tmp_path, Watch(), None, lambda config: 9)
    assert [job.method for job, _ in found] == ["layers=1", "layers=3"]

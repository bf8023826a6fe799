"""Stored results: they are read as they were written, and kept apart if settings differ."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from equipoise.core.errors import CheckpointError, ConfigError
from equipoise.papers import results
from equipoise.papers.jobs import Job
from tests.papers import toy


def run(method: str = "fedavg", seed: int = 0, rounds: int = 4, **changes: Any) -> dict[str, Any]:
    expression = {"prox": "fedprox(mu=0.1)"}.get(method, method)
    base = {"method": method, "expression": expression, "changes": {}, "seed": seed, "asked": 4, "seconds": 1.0}
    return base | {"rounds": rounds, "last": {"accuracy": 2 / 3}} | changes


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    first, _ = toy.experiments()
    cell = first.cells()[0]
    empty = results.read(tmp_path, first, cell)
    assert empty.runs == ()
    empty.with_run(run("prox", 1)).with_run(run("prox", 0, loss=float("nan"))).with_run(run()).write(tmp_path)
    found = results.read(tmp_path, first, cell)
    assert [(kept["method"], kept["seed"]) for kept in found.runs] == [("fedavg", 0), ("prox", 0), ("prox", 1)]
    assert found.settings == empty.settings
    assert found.run("prox", 0) is not None
    assert found.runs_of("prox")[0]["loss"] is None
    assert found.runs_of("prox")[1]["last"]["accuracy"] == 0.66667
    assert [one.cell for one in results.all_of(tmp_path, first)] == [cell]


def test_a_run_takes_one_line(tmp_path: Path) -> None:
    first, _ = toy.experiments()
    results.read(tmp_path, first, first.cells()[0]).with_run(run()).with_run(run(seed=1)).write(tmp_path)
    lines = (tmp_path / "toy-first" / "split=even_rho=2.json").read_text().splitlines()
    assert sum('"seed": ' in line for line in lines) == 2
    assert not any("data_dir" in line or '"dir"' in line for line in lines)


def test_the_run_with_more_rounds_stays() -> None:
    first, _ = toy.experiments()
    kept = results.CellResults("toy-first", first.cells()[0], (), {}).with_run(run(rounds=3))
    assert kept.with_run(run(rounds=2)).run("fedavg", 0)["rounds"] == 3  # type: ignore[index]
    assert kept.with_run(run(rounds=4)).run("fedavg", 0)["rounds"] == 4  # type: ignore[index]
    redefined = kept.with_run(run(rounds=2, expression="fedavgm"))
    assert [entry["rounds"] for entry in redefined.runs] == [2]


def test_a_job_is_missing_if_its_run_is_absent_unfinished_or_of_another_expression(tmp_path: Path) -> None:
    first, _ = toy.experiments()
    cell = first.cells()[0]
    jobs = [Job(first, cell, method, seed) for method in ("fedavg", "prox") for seed in (0, 1)]
    kept = results.read(tmp_path, first, cell).with_run(run()).with_run(run(seed=1, rounds=3))
    kept.with_run(run("prox", expression="fedprox(mu=7)")).with_run(run("prox", 1)).write(tmp_path)
    assert list(results.missing(jobs, tmp_path)) == [jobs[1], jobs[2]]
    shorter = Job(first, cell, "fedavg", 1, ("train.rounds=3",))
    assert list(results.missing([shorter], tmp_path)) == []


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    first, _ = toy.experiments()
    kept = results.read(tmp_path, first, first.cells()[0]).with_run(run())
    kept.write(tmp_path)
    path = tmp_path / kept.file
    path.write_text(path.read_text().replace('"lr": 0.1', '"lr": 0.3'))
    with pytest.raises(ConfigError, match=r"local\.lr = 0.3, now 0.1"):
        results.read(tmp_path, first, first.cells()[0])
    content = json.loads(path.read_text().replace('"lr": 0.3', '"lr": 0.1'))
    del content["settings"]["local"]["nesterov"]  # as if it had been added since, with its default
    path.write_text(json.dumps(content))
    assert results.read(tmp_path, first, first.cells()[0]).runs


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "x"}', '{"format": "equipoise results", "version": 2}'])
def test_a_file_without_results_is_refused_with_one_sentence(text: str, tmp_path: Path) -> None:
    first, _ = toy.experiments()
    path = tmp_path / "toy-first" / "split=even_rho=2.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read as results"):
        results.read(tmp_path, first, first.cells()[0])


def test_known_runs_are_found_by_their_settings(tmp_path: Path) -> None:
    first, second = toy.experiments()
    kept = results.read(tmp_path, first, first.cells()[1])
    kept.with_run(run("prox")).with_run(run("pair", changes={"train.cohort": 3}, expression="fedavg")).write(tmp_path)
    known = results.known_runs(tmp_path, [first, second])
    assert len(known) == 2
    wanted = Job(second, second.cells()[0], "prox", 0)
    assert known[results.key_of(wanted.settings, 0)]["method"] == "prox"
    assert results.key_of(wanted.settings, 1) not in known
    assert results.key_of(Job(second, second.cells()[0], "fedavg", 0).settings, 0) not in known


def test_no_run_is_lost_if_several_threads_store_runs_at_the_same_time(tmp_path: Path) -> None:
    first, _ = toy.experiments()
    cell = first.cells()[0]

    def keep(seed: int) -> None:
        with results.locked(tmp_path, first):
            found = results.read(tmp_path, first, cell)
            time.sleep(0.01)  # long enough for another thread to interfere
            found.with_run(run(seed=seed)).write(tmp_path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(keep, range(8)))
    assert [kept["seed"] for kept in results.read(tmp_path, first, cell).runs] == list(range(8))

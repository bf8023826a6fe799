"""Which runs train at the same time, and that a comparison gives the same table when they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.core.errors import ConfigError
from equipoise.runs import compare, grouping
from equipoise.runs import run as runs
from equipoise.runs.config import Config, override

BASE: dict[str, Any] = {
    "method": "fedavg",
    "data": {"source": "digits", "partition": {"kind": "iid", "clients": 5}},
    "model": {"name": "logistic"},
    "local": {"lr": 0.1, "batch": 64},
    "train": {"rounds": 2, "threads": 1, "device": "cpu", "precision": "float64"},
}


def config(*sets: str) -> Config:
    return Config.from_dict(override(BASE, sets))


def test_runs_that_differ_only_in_seed_and_data_are_grouped() -> None:
    alike = [
        config(),
        config("train.seed=1"),
        config("data.partition.kind=shards", "data.auxiliary=3"),
        config("data.minority=[0]"),
    ]
    assert list(grouping.groups(alike, lambda config: 9)) == [[0, 1, 2, 3]]
    assert list(grouping.groups(alike, lambda config: 3)) == [
        [0, 1],
        [2, 3],
    ]  # groups of equal size, so that they share a compiled program


def test_runs_whose_clients_take_equal_steps_are_not_grouped_with_longer_ones() -> None:
    fewer = "data.imbalance.kind=step", "data.imbalance.rho=4", "data.imbalance.minority=[0, 1, 2, 3, 4]"
    ragged = "data.partition.kind=dirichlet", "data.partition.alpha=0.5"
    mixed = [config(), config(*fewer), config(*ragged), config("train.seed=1"), config(*fewer, *ragged)]
    assert list(grouping.groups(mixed, lambda config: 9)) == [[0, 3], [1], [2, 4]]


@pytest.mark.parametrize(
    "change",
    ["method=scaffold", "local.lr=0.2", "model.name=mlp", "train.rounds=3", "train.precision=float32"],
)
def test_runs_with_other_settings_are_not_grouped(change: str) -> None:
    assert list(grouping.groups([config(), config(change), config("train.seed=1")], lambda config: 9)) == [
        [0, 2],
        [1],
    ]


def test_a_job_without_a_config_is_a_group_of_its_own() -> None:
    assert list(grouping.groups([None, config(), None, config()], lambda config: 9)) == [[0], [1, 3], [2]]


def test_a_gpu_takes_several_small_runs_at_once_and_a_cpu_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grouping.at_once(config()) == 1
    monkeypatch.setattr(grouping, "device_of", lambda config: "cuda")
    assert grouping.at_once(config()) == 16
    assert grouping.at_once(config("data.partition.clients=100")) == 4
    assert grouping.at_once(config("data.partition.clients=100", "train.cohort=50")) == 8
    assert grouping.at_once(config("data.partition.clients=600")) == 1
    assert grouping.at_once(config("model.name=mlp", "model.hidden=[2000, 1000]")) == 9  # 2.14 million parameters
    assert grouping.at_once(config("train.engine=serial")) == 1


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.device = 'cuda:7': torch finds no CUDA device"):
        grouping.at_once(config("train.device=cuda:7"))


def test_a_comparison_is_the_same_when_runs_train_at_the_same_time(tmp_path: Path) -> None:
    made = compare.cells(config(), {"a": ["method=fedavg"], "b": ["method=fednova"]}, seeds=2)
    made += compare.cells(config("data.auxiliary=2"), {"c": []}, seeds=1)
    one = compare.run_all(made, tmp_path / "one", runs.Watch())
    several = compare.run_all(made, tmp_path / "several", runs.Watch(), lambda config: 3)
    assert [(cell.name, config.train.seed) for cell, config, _ in several] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0),
    ]  # fmt: skip
    for (_, _, mine), (cell, its, other) in zip(one, several, strict=True):
        assert mine["last"]["confusion"] == other["last"]["confusion"]
        plan = json.loads((cell.folder(tmp_path / "several", its) / "plan.json").read_text())
        assert plan["together"] == (2 if cell.name == "b" else 3)
    again = compare.run_all(made, tmp_path / "several", runs.Watch(), lambda config: 3)
    assert [result for _, _, result in again] == [result for _, _, result in several]

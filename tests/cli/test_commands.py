"""The command line as a user meets it: output, exit codes, and one sentence for every mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from equipoise.cli import console, main

CONFIG = """
method = "fedavg"
[data]
source = "digits"
imbalance = { kind = "step", rho = 5, minority = [0, 2] }
partition = { kind = "dirichlet", clients = 6, alpha = 0.5 }
[model]
name = "logistic"
[local]
lr = 0.1
[train]
rounds = 2
device = "cpu"
threads = 1
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "first.toml"
    path.write_text(CONFIG)
    return path


class Said:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def equipoise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    def call(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["equipoise", *map(str, words)])
        monkeypatch.setattr(console, "out", Console(file=sys.stdout, width=140))
        monkeypatch.setattr(console, "err", Console(file=sys.stderr, width=140))
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call


def test_run_resume_and_report(config: Path, equipoise, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said = equipoise("run", config, "--out", "runs/a")
    assert said.code == 0, said.err
    assert "(minority)" in said.out
    assert "worst of the minority" in said.out
    assert (tmp_path / "runs/a/report.html").exists()
    again = equipoise("resume", "runs/a", "--json")
    assert again.code == 0
    assert json.loads(again.out)["last"]["round"] == 2
    page = equipoise("report", "runs", "--out", "page.html")
    assert page.code == 0, page.err
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_set_changes_a_setting_and_json_is_for_machines(config: Path, equipoise) -> None:  # type: ignore[no-untyped-def]
    said = equipoise("run", config, "--set", "train.rounds=1", "--set", "method=fedprox(mu=0.1)", "--json")
    result = json.loads(said.out)
    assert result["last"]["round"] == 1
    assert result["method"] == "fedprox(mu=0.1)"


def test_compare_goes_on_where_it_stopped(config: Path, equipoise, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ("compare", config, "--methods", "fedavg, scaffold, local, centralised", "--seeds", 2, "--out", "runs/c")
    said = equipoise(*words)
    assert said.code == 0, said.err
    assert "2 seeds" in said.out
    rows = json.loads((tmp_path / "runs/c/compare.json").read_text())
    assert [row["name"] for row in rows] == ["fedavg", "scaffold", "local", "centralised"]
    assert all(row["seeds"] == 2 and row["accuracy"]["interval"] is not None for row in rows)
    before = (tmp_path / "runs/c/fedavg/seed-0/metrics.jsonl").stat().st_mtime_ns
    assert equipoise(*words).code == 0
    assert (tmp_path / "runs/c/fedavg/seed-0/metrics.jsonl").stat().st_mtime_ns == before
    other = equipoise(*words, "--set", "local.lr=0.2")
    assert other.code == 2
    assert "another config" in other.err


def test_sweep(config: Path, equipoise, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said = equipoise(
        "sweep", config, "--grid", "local.lr=0.01,0.1", "--grid", "local.epochs=1,2", "--out", "s", "--json"
    )
    assert [row["name"] for row in json.loads(said.out)["rows"]] == [
        "local.lr=0.01 local.epochs=1",
        "local.lr=0.01 local.epochs=2",
        "local.lr=0.1 local.epochs=1",
        "local.lr=0.1 local.epochs=2",
    ]


def test_describe_lists_what_crosses_the_line(equipoise) -> None:  # type: ignore[no-untyped-def]
    entries = json.loads(equipoise("describe", "scaffold + fedprox(mu=0.1)", "--json").out)["entries"]
    found = {(entry["direction"], entry["what"], entry["size"]) for entry in entries}
    assert ("receives", "scaffold: c", "model") in found
    assert ("sends", "scaffold: change", "model") in found
    assert ("keeps", "scaffold: c", "model") in found
    assert ("reveals", "nothing", "") in found
    assert "scaffold" in equipoise("describe", "scaffold").out


def test_lists(equipoise) -> None:  # type: ignore[no-untyped-def]
    assert "scaffold" in equipoise("methods").out
    assert "digits" in equipoise("datasets").out
    listed = {row["name"]: row["settings"] for row in json.loads(equipoise("methods", "--json").out)}
    assert listed["fedprox"] == {"mu": 0.01}  # settings, not class variables
    assert "reveals" not in equipoise("methods").out
    assert {"fedavg", "fedsgd", "scaffold", "fednova"} <= set(listed)


def test_the_demo_shows_the_minority(equipoise, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said = equipoise("demo", "--rounds", 1, "--out", tmp_path / "demo")
    assert said.code == 0, said.err
    assert "0 *" in said.out
    assert "climb + fedshift" in said.out
    assert (tmp_path / "demo" / "report.html").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("name = ", "nmae = "), "model.name is missing"),
        (("lr = 0.1", "lrr = 0.1"), "did you mean 'lr'"),
        (("lr = 0.1", "lr = -0.1"), "local.lr = -0.1: expected a number above 0"),
        (("lr = 0.1", "lr = nan"), "local.lr"),
        (('method = "fedavg"', 'method = "fedpox"'), "did you mean 'fedprox'"),
        (('source = "digits"', 'source = "digit"'), "did you mean 'digits'"),
        (("clients = 6", "clients = 0"), "clients"),
        (("rounds = 2", "rounds = 2\ncohort = 7"), "train.cohort = 7: expected at most 6"),
        (("[train]", "[train]\nmethod = 'scaffold'"), "method"),
        (('source = "digits"', 'source = "nowhere.csv"'), "nowhere.csv"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    change: tuple[str, str],
    sentence: str,
    config: Path,
    equipoise,  # type: ignore[no-untyped-def]
) -> None:
    config.write_text(CONFIG.replace(*change))
    said = equipoise("run", config, "--out", "runs/bad")
    assert said.code == 2, said.out + said.err
    assert sentence in said.err.replace("\n", " ")
    assert "Traceback" not in said.err
    assert said.err.count("error:") == 1


def test_a_missing_config_names_the_nearest(config: Path, equipoise) -> None:  # type: ignore[no-untyped-def]
    said = equipoise("run", "frist.toml")
    assert said.code == 2
    assert "did you mean first.toml" in said.err.replace("\n", " ")


def test_resume_of_a_folder_that_is_no_run(equipoise, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said = equipoise("resume", tmp_path)
    assert said.code == 2
    assert str(tmp_path) in said.err.replace("\n", "")

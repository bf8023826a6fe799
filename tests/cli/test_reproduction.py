"""`equipoise reproduce` as a user meets it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from equipoise.cli import console, main
from equipoise.cli.reproduction import Request, reproduce_papers
from equipoise.papers.experiment import experiments

KEPT = Path(__file__).parents[1] / "papers" / "results"
CELL = "dataset=mnist,rho=10,alpha=0,minority=3"


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)


def said(request: Request) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    reproduce_papers(request, Console(file=out, width=100), Console(file=err, width=100))
    return out.getvalue(), err.getvalue()


def test_without_a_name_the_experiments_are_listed() -> None:
    out, _ = said(Request(None, results=KEPT))
    assert all(name in out for name in experiments())
    lines = out.splitlines()
    (place,) = [place for place, line in enumerate(lines) if "climb-table2" in line]
    assert lines[place].split()[1:5] == ["24", "0", "1", "Table"]
    assert lines[place + 1].strip() == "not at hand: mnist, cifar10"


def test_a_look_shows_paper_and_rerun_and_runs_nothing() -> None:
    out, err = said(Request("climb-table2", (CELL,), show=True, results=KEPT))
    assert err == ""
    assert "dataset=mnist,rho=10,minority=3,alpha=0" in out
    fedavg = [line.split() for line in out.splitlines() if line.strip().startswith("fedavg")]
    assert fedavg[1] == ["fedavg", "71.3", "56.3", "-15.1", "4", "→", "2", "30", "of", "1,000", "1"]
    assert "not run" in out


def test_a_run_from_the_words_to_the_table(tmp_path: Path) -> None:
    request = Request("fedre-figures", ("figure=4",), "layers=3", rounds=250, seeds=2)
    out, err = said(request)
    assert "2 runs, 0 already done" in err
    assert "2 of 2: figure=4 layers=3 seed 1: 250 rounds" in err
    assert "250 of 1,000" in out
    kept = json.loads((tmp_path / "results" / "fedre-figures" / "figure=4.json").read_text())
    assert kept["runs"][0]["made"]["command"] == (
        "equipoise reproduce fedre-figures --cells figure=4 --methods layers=3 --seeds 2 --rounds 250"
    )
    assert "2 runs, 2 already done" in said(request)[1]


def test_a_spent_budget_says_what_is_left() -> None:
    _, err = said(Request("fedre-figures", ("figure=4",), "layers=1", rounds=250, budget="0s"))
    assert "the budget of 0s is spent: 1 run not done; run the same command to continue" in err


def test_the_command_of_a_result_names_no_folders() -> None:
    request = Request(
        "fedre-table2", ("rho=5",), "fedavg, climb(eta=1)", True, 2, 30, "10m", ("data.partition.alpha=1",),
        Path("secret"), Path("out"), Path("found"),
    )  # fmt: skip
    assert request.command == (
        "equipoise reproduce fedre-table2 --cells rho=5 --methods 'fedavg, climb(eta=1)' --extra --seeds 2"
        " --rounds 30 --set data.partition.alpha=1"
    )


@pytest.fixture
def equipoise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["equipoise", "reproduce", *map(str, words)])
        monkeypatch.setattr(console, "out", Console(file=sys.stdout, width=140))
        monkeypatch.setattr(console, "err", Console(file=sys.stderr, width=140))
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        heard = capsys.readouterr()
        return code, heard.out, heard.err.replace("\n", " ")

    return call


def test_json_is_for_machines(equipoise) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = equipoise("climb-table2", "--cells", CELL, "--show", "--results", KEPT, "--json")
    assert code == 0
    (cell,) = json.loads(out)
    assert cell["rounds"] == 1000
    assert [method["method"] for method in cell["methods"]] == ["fedavg", "climb", "ratio_loss", "focal_loss"]
    assert cell["methods"][1]["values"]["minority_accuracy"]["paper"] == 0.8029
    listed = json.loads(equipoise("--json", "--results", KEPT)[1])
    (entry,) = [entry for entry in listed if entry["experiment"] == "climb-table2"]
    assert (entry["cells"], entry["run"], entry["in_part"]) == (24, 0, 1)


def test_pages_are_written_without_running(equipoise, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, _, err = equipoise("--markdown", "page.md", "--html", "page.html", "--results", KEPT)
    assert code == 0, err
    assert "climb-table2" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "page" / "climb-table2.svg").exists()
    assert "<svg" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("climb-tabel2",), "did you mean 'climb-table2'"),
        (("climb-table2", "--cells", "roh=10"), "did you mean 'rho'"),
        (("climb-table2", "--methods", "clim"), "did you mean 'climb'"),
        (("climb-table2", "--set", "local.lrr=1"), "did you mean 'lr'"),
        (("climb-table2", "--budget", "soon"), "--budget 'soon': expected a time such as 10m"),
        (("climb-table2", "--rounds", "0"), "--rounds 0: expected 1 or more"),
        (("climb-table2", "--seeds", "0"), "--seeds 0: expected 1 or more"),
        (("climb-table2", "--cells", CELL), "torchvision.datasets.MNIST(folder, download=True) fetches them"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words: tuple[str, ...], sentence: str, equipoise) -> None:  # type: ignore[no-untyped-def]
    code, _, err = equipoise(*words)
    assert code == 2, err
    assert sentence in err
    assert "Traceback" not in err
    assert err.count("error:") == 1

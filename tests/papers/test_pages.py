"""The results as Markdown, drawings and HTML."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from equipoise.papers import experiments, find, markdown, results, web_page
from equipoise.papers.comparison import blocks
from equipoise.papers.figures import drawings, lines, sheet
from tests.papers.test_comparison import run

ROOT = Path(__file__).parent.parent.parent
KEPT = Path(__file__).parent / "results"
TABLE = find("climb-table2")


def test_the_committed_page_is_made_from_the_committed_results() -> None:
    made = markdown.pages(experiments().values(), ROOT / "results", "results")
    for name, content in made.items():
        again = "run `equipoise reproduce --markdown docs/results.md`"
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == content, (
            f"docs/{name} is not up to date: {again}"
        )
    drawn = {f"results/{path.name}" for path in (ROOT / "docs" / "results").glob("*.svg")}
    assert drawn == made.keys() - {"results.md"}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Results of three kinds: the stored ones of this folder, a whole cell with a variant of it, and a note."""
    root = tmp_path / "results"
    shutil.copytree(KEPT, root)
    cell = TABLE.cells()[1]
    whole = results.read(root, TABLE, cell)
    for seed in (0, 1):
        for place, method in enumerate((*TABLE.methods, "climb_fedshift")):
            whole = whole.with_run(run(method, seed, 0.8 + 0.01 * place + 0.005 * seed, 0.9) | {"seconds": 30.0})
    whole.write(root)
    other = results.read(root, TABLE, cell, ("local.lr=0.1",))
    other.with_run(run("fedavg", 0, 0.4, 0.5) | {"seconds": 1.0, "failed": "not a number"}).write(root)
    (root / TABLE.name / "notes.md").write_text("A word on it.\n")
    return root


def test_the_markdown_page_tells_which_cells_were_run(kept: Path) -> None:
    text = markdown.pages(experiments().values(), kept, "results")["results.md"]
    rows = {line.split(" | ")[1]: line for line in text.splitlines() if line.startswith("| ")}
    assert "| [climb-table2](#climb-table2) | Table 2: 100 clients, all of them in every round | 24 | 1 | 1 |" in text
    assert "| climb-table1 | Table 1: 500 clients, 100 of them in every round | 16 | 0 | 0 |" in text
    assert "| dataset=mnist,rho=10,minority=3,alpha=0 | fedavg | 30 of 1,000 | 1 | 1.5 |" in text
    assert "climb | 1,000 | 2 | 94.3 | 81.2 | 81.0 to 81.5 | -13.0 | 1 → 3 |" in text
    assert rows["climb_fedshift +"].split(" | ")[5] == "**84.2**"
    assert "dataset=mnist,rho=10,minority=1,alpha=0.1 with local.lr=0.1" in text
    assert "Failed: dataset=mnist,rho=10,minority=1,alpha=0.1 with local.lr=0.1, fedavg: not a number" in text
    assert "Not run: dataset=mnist,rho=10,minority=1,alpha=0; " in text
    assert "three minority classes | 0, 2, 4 |" in text
    assert "A word on it." in text
    assert "`equipoise reproduce climb-table2 --cells" in text
    assert "Minority on mnist, over cells with all rounds:" in text
    assert "| climb_fedshift + |  |  | 1 of 1 cell |" in text


def test_pages_are_written_side_by_side(kept: Path, tmp_path: Path) -> None:
    written = markdown.write(experiments().values(), kept, tmp_path / "docs" / "table.md")
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [
        "docs/table/climb-table2.svg",
        "docs/table.md",
    ]
    assert "](table/climb-table2.svg)" in (tmp_path / "docs" / "table.md").read_text()


@pytest.mark.parametrize(("name", "axis"), [("fedre-table2", "round"), ("fedre-figures", "iteration")])
def test_losses_are_drawn_against_rounds_or_iterations(name: str, axis: str) -> None:
    experiment = find(name)
    drawn = [image for one in blocks(experiment, ROOT / "results") for image in drawings(experiment, one)]
    losses = [image for what, image in drawn if what == "loss"]
    assert losses
    assert all(f">{axis}</text>" in image for image in losses)


def test_a_sheet_draws_every_cell_that_has_curves(kept: Path) -> None:
    image = sheet(TABLE, blocks(TABLE, kept))
    assert image is not None
    tree = ET.fromstring(image)
    named = "{http://www.w3.org/2000/svg}"
    assert len(tree.findall(f".//{named}svg")) == 2  # minority and overall of the one cell with curves
    assert len(tree.findall(f".//{named}polyline")) == 4
    assert sheet(TABLE, blocks(TABLE, kept)[:1]) is None


def test_a_curve_is_the_mean_over_seeds(kept: Path) -> None:
    cell = TABLE.cells()[0]
    entry = results.read(kept, TABLE, cell)
    for seed, top in ((0, 0.4), (1, 0.8)):
        curve = {"round": [1, 2], "accuracy": [0.2, top], "minority_accuracy": [None, top]}
        entry = entry.with_run(run("fedavg", seed, 0.1, top) | {"curve": curve})
    entry.write(kept)
    one = blocks(TABLE, kept, [cell])[0]
    (minority, few), (overall, many) = drawings(TABLE, one)
    assert (minority, overall) == ("minority accuracy, %", "overall accuracy, %")
    assert many == lines({"fedavg": [(1, 20.0), (2, 60.0)]}, "round")
    assert few.count("polyline") == 2  # the opening and the closing tag of one line


def test_a_line_along_zero_can_be_drawn() -> None:
    assert "1e-" not in lines({"fedavg": [(1, 0.0), (2, 0.0)]}, "round")


def test_the_html_page_has_tables_and_drawings(kept: Path, tmp_path: Path) -> None:
    path = web_page.write(experiments().values(), kept, tmp_path / "page.html")
    text = path.read_text()
    assert text.count("<h2>") == 1
    assert text.count("<table>") == 3
    assert text.count("<svg") == 2
    assert "30 of 1,000" in text
    assert "Not run: dataset=mnist,rho=10,minority=1,alpha=0;" in text
    none = web_page.write([find("climb-appendix-fashion")], kept, tmp_path / "none.html").read_text()
    assert "numbers not published" in none
    assert "Not run" in none

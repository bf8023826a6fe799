"""The HTML report: its numbers and drawings, missing values, and errors for broken run folders."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from equipoise.core.errors import CheckpointError, ConfigError
from equipoise.report import Run, write
from equipoise.report.markup import MISSING, apart, tag, ticks
from equipoise.runs import metrics
from equipoise.runs.folder import RunFolder

CLASSES = ["cat", "dog", "owl"]
FEDERATION = {"classes": CLASSES, "minority": [2], "train_counts": [500, 400, 40], "clients": 10}
VOID = {"meta"}


def record(at: int, hits: tuple[int, int, int], **changes: Any) -> dict[str, Any]:
    matrix = [[hits[i] if i == j else (10 - hits[i] if j == (i + 1) % 3 else 0) for j in range(3)] for i in range(3)]
    return {"round": at, **metrics.summary(matrix, [2], [500, 400, 40]), **changes}


def run(name: str = "alpha", **changes: Any) -> Run:
    records = [record(5, (6, 5, 1)), record(10, (9, 9, 4)), record(15, (8, 9, 3))]
    base = Run(name, "fedavg", {"method": "fedavg", "train": {"rounds": 15}}, records, CLASSES, [2], [500, 400, 40])
    return dataclasses.replace(base, **changes)


class Page(HTMLParser):
    """The parsed page; it fails if elements are not nested correctly."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)
        if name == "tr":
            self.rows.append([])
        if name in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def count(self, name: str, style: str) -> int:
        return sum(tag == name and style in (a.get("class") or "").split() for tag, a in self.tags)

    def titles(self) -> list[str]:
        return re.findall(r"<title>(.*?)</title>", self.source)


def rendered(runs: list[Run], folder: Path) -> Page:
    return Page(write(runs, folder / "report.html", title="A title"))


def test_the_table_holds_the_last_round_and_the_best(tmp_path: Path) -> None:
    page = rendered([run(), run("beta", records=[record(5, (5, 5, 5))])], tmp_path)
    head, alpha, beta = page.rows
    assert head == [
        *("Run", "Method", "Rounds", "Overall", "Minority"),
        *("Worst class", "Balanced", "Macro F1", "Best round"),
    ]
    macro = 100 * run().records[-1]["macro_f1"]
    assert alpha == [
        *("alpha", "fedavg", "15", "66.7", "30.0", "30.0 owl", "66.7", f"{macro:.1f}", "73.3 at 10"),
    ]
    assert beta[2:6] == ["5", "50.0", "50.0", "50.0 cat"]
    tops = re.findall(r'<td class="number top">([^<]+)', page.source)
    assert tops[:3] == ["66.7", "66.7", f"{macro:.1f}"]  # alpha's; then beta's minority and worst class
    assert tops[3:] == ["50.0", "50.0 "]


def test_the_lead_names_the_best_run_for_the_minority(tmp_path: Path) -> None:
    lead = " ".join(rendered([run(), run("beta", records=[record(5, (5, 5, 5))])], tmp_path).text)
    assert re.search(r"beta\s+serves the minority best, with 50.0\W%\s+at 50.0", lead)
    assert re.search(r"alpha\s+is the most accurate overall, with 66.7\W%, and 30.0\W% for", lead)
    assert "serves the minority" not in "".join(rendered([run()], tmp_path).text)


def test_baselines_are_shown_but_not_ranked(tmp_path: Path) -> None:
    pooled = run("pooled", method="centralised", records=[record(5, (10, 10, 10))])
    page = rendered([run(), run("beta", records=[record(5, (5, 5, 5))]), pooled], tmp_path)
    assert re.search(r"beta\s+serves the minority best", " ".join(page.text))
    assert "100.0" not in "".join(re.findall(r'<td class="number top">([^<]+)', page.source))


def test_curves_bars_and_matrices_show_every_value(tmp_path: Path) -> None:
    page = rendered([run(), run("beta")], tmp_path)
    titles = page.titles()
    for name in ("alpha", "beta"):
        assert f"{name}, round 10: 40.0 %" in titles  # minority
        assert f"{name}, round 10: 73.3 %" in titles  # overall
        assert f"{name}, owl: recall 30.0 %" in titles
    assert titles.count("owl taken for cat: 7 of 10 (70.0 %)") == 2
    assert "cat: 500 training samples" in titles
    assert page.count("polyline", "line") == 4
    assert page.count("rect", "bar") == 6
    assert page.count("rect", "other") == 4  # the bars of the majority are paler
    assert page.count("text", "mark") == 1
    assert page.count("rect", "band") == 1
    places = [page.source.index(f">{name}<title>{name}") for name in CLASSES]
    assert places == sorted(places)


def test_bars_are_in_the_order_of_training_counts(tmp_path: Path) -> None:
    source = rendered([run(train_counts=[1, 5, 3])], tmp_path).source
    places = [source.index(f"{name}: recall") for name in ("dog", "owl", "cat")]
    assert places == sorted(places)


def test_the_page_is_self_contained_and_escapes_what_it_shows(tmp_path: Path) -> None:
    nasty = "<script>alert(\"1\")</script> & 'co'"
    page = Page(
        write(
            [run(nasty, method=nasty, classes=[nasty, "b", "c"], config={nasty: nasty})],
            tmp_path / "x.html",
            nasty,
        )
    )
    names = {name for name, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object"}
    assert not [a for _, attributes in page.tags for a in attributes if a in ("src", "href", "onload")]
    assert not re.search(r"https?:|url\(|@import", page.source)
    assert page.text.count(nasty) >= 3
    assert "prefers-color-scheme: dark" in page.source
    assert "@media print" in page.source


def test_missing_values_leave_gaps(tmp_path: Path) -> None:
    bare = run("bare", records=[{"round": 1}, {"round": 2, "accuracy": 0.5}], minority=[], train_counts=[])
    page = rendered([bare], tmp_path)
    assert page.rows[1][3:] == ["50.0", MISSING, MISSING, MISSING, MISSING, "50.0 at 2"]
    assert page.count("polyline", "line") == 1
    assert page.text.count("not tested") == 3
    assert "No confusion matrix was kept." in page.text
    holes = run(records=[record(1, (1, 1, 1), accuracy=None, minority_accuracy=float("nan")), record(2, (2, 2, 2))])
    points = re.findall(r'points="([^"]*)"', rendered([holes], tmp_path).source)
    assert [len(line.split()) for line in points] == [1, 1]


def test_a_run_without_rounds_and_a_class_without_samples(tmp_path: Path) -> None:
    page = rendered([run(records=[])], tmp_path)
    assert "No round was evaluated yet." in page.text
    assert page.rows[1][2:] == ["0", MISSING, MISSING, MISSING, MISSING, MISSING, MISSING]
    absent = metrics.summary([[3, 1, 0], [0, 0, 0], [1, 0, 1]], [1])
    page = rendered([run(records=[{"round": 1, **absent}])], tmp_path)
    assert page.text.count("not tested") == 1
    assert page.count("rect", "right") == 11 + 2  # the key's, and two classes on the diagonal


def test_recall_is_computed_from_the_confusion_matrix_if_it_is_missing(tmp_path: Path) -> None:
    only = [{key: value for key, value in record(3, (8, 7, 6)).items() if key != "recall"}]
    assert "alpha, owl: recall 60.0 %" in rendered([run(records=only)], tmp_path).titles()


def test_long_runs_and_many_classes_stay_small(tmp_path: Path) -> None:
    long = [{"round": at, "accuracy": at / 6000} for at in range(1, 5001)]
    page = rendered([run(records=long)], tmp_path)
    assert page.count("circle", "dot") <= 121
    assert "alpha, round 5000: 83.3 %" in page.titles()  # the last point is never thinned away
    names = [f"class {index}" for index in range(62)]
    matrix = [[50 if i == j else 1 for j in range(62)] for i in range(62)]
    summary = metrics.summary(matrix, [61], list(range(62, 0, -1)))
    wide = run(records=[{"round": 1, **summary}], classes=names, minority=[61], train_counts=list(range(62, 0, -1)))
    page = rendered([wide] * 5, tmp_path)
    assert page.count("rect", "wrong") == 11 + 5 * 62 * 61
    assert page.count("div", "column") == 1
    assert len(page.source) < 5 * 700_000


def test_reading_a_run_folder(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "first", {"method": "scaffold", "train": {"rounds": 2}}) as folder:
        folder.write("federation", FEDERATION)
        folder.append(record(1, (5, 5, 5)))
        folder.append(record(2, (6, 6, 6)))
    with (tmp_path / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "accu')  # killed while writing
    found = Run.read(tmp_path / "first")
    assert (found.name, found.method, found.rounds) == ("first", "scaffold", 2)
    assert (found.classes, found.minority, found.train_counts) == (CLASSES, [2], [500, 400, 40])
    assert found.config["train"] == {"rounds": 2}
    assert found.final("accuracy") == pytest.approx(0.6)
    assert rendered([found], tmp_path).rows[1][:3] == ["first", "scaffold", "2"]


@pytest.mark.parametrize(
    ("federation", "line", "sentence"),
    [
        (None, "", "first is not the folder of a run: it has no federation.json"),
        ("{", "", r"federation.json cannot be read \(JSONDecodeError"),
        ("[]", "", "federation.json cannot be read"),
        ('{"classes": 3}', "", "federation.json cannot be read"),
        ('{"classes": ["a"], "minority": [1]}', "", r"names the minority \[1\]; expected 0 to 0"),
        ('{"classes": ["a"], "train_counts": [1, 2]}', "", "has 2 train_counts for 1 classes"),
        (
            '{"classes": ["a"]}',
            '{"confusion": [[1, 2]]}\n',
            "line 1 of .* does not hold metrics of 1 classes",
        ),
        ('{"classes": ["a"]}', '{"confusion": [["x"]]}\n', "line 1 of .* does not hold metrics of 1 classes"),
        ('{"classes": ["a"]}', '{"recall": "high"}\n', "line 1 of .* does not hold metrics of 1 classes"),
        ('{"classes": ["a"]}', "nonsense\n{}\n", "line 1 of .* is not a JSON record"),
    ],
)
def test_a_broken_run_folder_is_refused_with_one_sentence(
    tmp_path: Path, federation: str | None, line: str, sentence: str
) -> None:
    RunFolder.create(tmp_path / "first", {"method": "fedavg"}).close()
    (tmp_path / "first" / "metrics.jsonl").write_text(line)
    if federation is not None:
        (tmp_path / "first" / "federation.json").write_text(federation)
    with pytest.raises(CheckpointError, match=sentence):
        Run.read(tmp_path / "first")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a run folder: it has no config.json"):
        Run.read(tmp_path / "nowhere")


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one run"):
        write([], tmp_path / "x.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the report"):
        write([run()], tmp_path / "file" / "x.html")
    assert write([run("\ud800")], tmp_path / "new" / "x.html").is_file()  # half a surrogate pair, which JSON can hold


def test_ticks_enclose_the_range_with_round_steps() -> None:
    assert ticks(0.81, 0.84, 6, least_step=0.01) == [0.81, 0.82, 0.83, 0.84]
    assert ticks(3, 3, 6, least_step=1) == [3, 4]
    assert ticks(1, 5000, 6) == [0, 1000, 2000, 3000, 4000, 5000]
    for low, high in ((0.0, 1.0), (0.333, 0.334), (17, 230)):
        marks = ticks(low, high, 6)
        assert marks[0] <= low < high <= marks[-1]
        assert len(marks) <= 8


def test_names_are_moved_apart() -> None:
    moved = apart([95, 96, 97], 10, 0, 100)
    assert moved == [80, 90, 100]
    assert apart([5, 90], 10, 0, 100) == [5, 90]


def test_attributes_are_escaped() -> None:
    assert tag("p", class_='"><b>', id=None) == '<p class="&quot;&gt;&lt;b&gt;"></p>'

"""The benchmark suite: what it measures is what it says, failures do not stop it, and the page is up to date."""

from __future__ import annotations

import doctest
import json
import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import drawing, host, jobs, page, show
from benchmarks.cases import BOUND, OURS, Contest, Growth, Whole
from benchmarks.drawing import decades, lines
from benchmarks.host import ALL, RUN, Host, HostError
from benchmarks.jobs import JOBS, Case
from benchmarks.pace import Timed, Turns, compete
from benchmarks.peers import process
from benchmarks.peers.process import Peer, PeerError, Process
from benchmarks.plain import Plain, centralised, loop
from benchmarks.work import Work
from equipoise import models
from equipoise.core.errors import ConfigError
from equipoise.runs import run as runs
from equipoise.runs.folder import read_metrics

ROOT = Path(__file__).parent.parent
TINY = Work("logistic", shape=(1, 4, 4), clients=4, samples=10, batch=4)
QUICK = Turns(count=2, seconds=0.001, most=0.1)


# -- the page -------------------------------------------------------------------------------------------------------
def test_the_committed_page_is_made_from_the_committed_results() -> None:
    made = page.pages(page.RESULTS)
    for name, content in made.items():
        again = f"docs/{name} is not up to date: run `python -m benchmarks.page`"
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == content, again
    drawn = {f"speed/{path.name}" for path in (ROOT / "docs" / "speed").glob("*.svg")}
    assert drawn == made.keys() - {"speed.md"}


def row(seconds: float, times: float, **more: float) -> dict[str, float]:
    return {"seconds": seconds, "samples_per_second": 1000 / seconds, "times": times, **more}


AT_START = {"start_up": 1.5, "ready": 20.0, "peak_mib": 512.0}
MEASURED = {
    "mlp": {"mlp": {"rows": {OURS: row(0.4, 1, **AT_START), BOUND: row(0.3, 0.75), "plain loop": row(1.2, 3)}}},
    "cnn": {"cnn": {"failed": "TrainingError: out | of memory"}},
    "pfl": {
        "pfl, end to end": {"what": "small", "rounds": 1500, "seconds": 59.0, "peak_mib": 1.0},
        "pfl": {"rows": {OURS: row(0.02, 1, **AT_START), BOUND: row(0.01, 0.5), "plain loop": {"failed": "no"}}},
    },
    "ragged": {"ragged, mlp": {"rows": {"ragged": row(0.5, 1), "equal sizes": row(0.4, 0.8)}}},
    "chains": {"chains": {"rows": {"fedavg": row(0.4, 1), "climb": row(0.48, 1.2)}}},
    "growth": {
        "clients": {"axis": "clients", "series": {OURS: [(10, 0.01), (1000, 1.0)], BOUND: [(10, 0.02), (1000, 0.9)]}},
        "cohort": {"failed": "RuntimeError: no"},
    },
    "peers": {
        "fedjax": {"version": "0.0.17", "rows": {OURS: row(0.4, 1), BOUND: row(0.3, 0.75), "fedjax": row(0.8, 2)}},
        "fedlab": {"failed": "PeerError: it did not install"},
    },
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    where = {"device": "a machine", "cores": 2, "date": "2026-01-01", "commit": None, "versions": {"torch": "2"}}
    kept = {name: {**where, "cases": cases} for name, cases in MEASURED.items()}
    (tmp_path / "cpu.json").write_text(json.dumps(kept))
    return tmp_path


def test_the_page_says_what_was_measured_what_failed_and_what_is_missing(results: Path) -> None:
    text = page.pages(results)["speed.md"]
    for line in (
        "Measured on a machine, 2 cores, torch 2, 2026-01-01, commit unknown.",
        "| mlp | 400 | 2,500 | 0.75 | 3.00 | 1.5 | 20.0 | 512 |",
        "| drawn | not measured yet |  |  |  |  |  |  |",
        "| cnn | failed: TrainingError: out \\| of memory |  |  |  |  |  |  |",
        "| pfl | 20 | 50,000 | 0.50 | failed | 1.5 | 20.0 | 512 |",
        "| pfl, end to end: small | 1,500 | 59.0 |",
        "| mlp | 2,000 | 2,500 | 0.80 |",
        "| climb | 480 | 1.20 |",
        "| fedjax | 0.0.17 | 800 | 2.00 | 400 | 0.75 |",
        "| fedlab | failed: PeerError: it did not install |  |  |  |  |",
        "cohort: failed: RuntimeError: no.",
        "](speed/cpu.svg)",
    ):
        assert line in text.splitlines() or line in text, line
    nothing = text.partition("## One H200")[2]
    assert nothing.count("not measured yet |") == 5
    assert nothing.count("Not measured yet.") == 5


def test_jobs_that_were_measured_apart_say_where_each_was(results: Path) -> None:
    file = results / "cpu.json"
    kept = json.loads(file.read_text())
    kept["mlp"]["date"] = "2026-02-02"
    file.write_text(json.dumps(kept))
    text = page.pages(results)["speed.md"]
    assert "2026-02-02, commit unknown (mlp)." in text
    assert "2026-01-01, commit unknown (cnn, pfl, ragged, chains, growth, peers)." in text


def test_pages_are_written_with_their_drawings(results: Path, tmp_path: Path) -> None:
    page.write(results, tmp_path / "docs")
    image = ET.fromstring((tmp_path / "docs" / "speed" / "cpu.svg").read_text())
    assert len(image.findall(".//{http://www.w3.org/2000/svg}polyline")) == 2
    assert (tmp_path / "docs" / "speed.md").read_text() == page.pages(results)["speed.md"]


@pytest.mark.parametrize("module", [drawing, show])
def test_docstring_examples_run(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_growth_in_proportion_is_a_straight_line() -> None:
    image = ET.fromstring(lines({OURS: [(10, 0.001), (100, 0.01), (1000, 0.1)]}, "clients"))
    line = image.find(".//polyline")
    assert line is not None
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)
    assert y2 < y1 < y0
    assert decades([10, 10]) == [10.0, 100.0]


# -- what is measured ------------------------------------------------------------------------------------------------
class Pipe:
    """Gives orders and notes what comes back, with the rounds that were on record by then."""

    def __init__(self, orders: list[tuple[str, int]], folder: Path) -> None:
        self.orders, self.folder = orders, folder
        self.heard: list[tuple[int, dict[str, Any]]] = []

    def recv(self) -> tuple[str, int]:
        if not self.orders:
            raise EOFError
        return self.orders.pop(0)

    def send(self, answer: dict[str, Any]) -> None:
        run = self.folder / "run"
        self.heard.append((len(read_metrics(run)) if run.exists() else 0, answer))


def test_a_run_advances_by_as_many_rounds_as_it_is_told(tmp_path: Path) -> None:
    pipe = Pipe([(RUN, 1), ("toy", 5), (RUN, 3)], tmp_path)
    told: list[int] = []
    served = host._Served(pipe, TINY, {"toy": lambda work, device: told.append}, "cpu")
    with pytest.raises(EOFError):
        served.run(tmp_path, {"evaluate_every": 1})
    assert [rounds for rounds, _ in pipe.heard] == [1, 1, 4]
    assert told == [5]
    assert pipe.heard[0][1].keys() == {"seconds", "peak_mib", "compiled_from"}
    assert not (tmp_path / "run" / "result.json").exists()  # of 10,000 rounds


def broken(work: Work, device: str) -> Any:
    raise ValueError("no such luck\nat all")


def dying(work: Work, device: str) -> Any:
    os._exit(3)


def test_a_host_is_a_process_that_outlives_a_broken_contestant_but_not_itself() -> None:
    one = Host(TINY, "cpu", {"broken": broken, "dying": dying, BOUND: centralised})
    try:
        assert one.timed(RUN, 2) > 0
        assert one.facts["peak_mib"] > 50
        with pytest.raises(HostError, match=r"^ValueError: no such luck$"):
            one.timed("broken", 1)
        assert one.timed(BOUND, 1) > 0
        with pytest.raises(HostError, match="exit code 3"):
            one.timed("dying", 1)
    finally:
        one.close()


def test_a_run_that_fails_says_so_to_whoever_advances_it() -> None:
    one = Host(replace(TINY, method="fedshift(prior='odd')"), "cpu")
    try:
        with pytest.raises(HostError, match=r"^ConfigError: .*prior"):
            one.timed(RUN, ALL)
    finally:
        one.close()


def test_work_is_what_it_says(tmp_path: Path) -> None:
    drawn = replace(TINY, cohort=2, alpha=0.5)
    assert (drawn.pool, drawn.cohort_samples) == (40, 20)
    fed = runs.federate(drawn.config(tmp_path, "cpu"))
    assert (fed.clients, fed.cohort, int(fed.offsets[-1]), fed.test) == (4, 2, 40, None)
    tested = runs.federate(replace(TINY, test=6).config(tmp_path, "cpu"))
    assert tested.test is not None
    assert (len(tested.test), int(tested.offsets[-1])) == (6, 40)
    assert drawn.describe("cpu") == "logistic, 4 clients x 10 in the mean, Dirichlet(0.5), 2 drawn, batch 4, float32"
    assert drawn.describe("cuda").endswith("tf32")
    eager = replace(TINY, compile=False)
    assert (eager.config(tmp_path, "cpu").train.compile, TINY.config(tmp_path, "cpu").train.compile) == (
        False,
        "auto",
    )
    assert eager.describe("cpu").endswith("not compiled")


def test_the_bound_takes_as_many_steps_as_a_client_on_as_many_samples_as_a_cohort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(Plain, "step", lambda self, rows: seen.append(len(rows)))
    rounds = centralised(replace(TINY, cohort=3), "cpu")
    seen.clear()
    rounds(2)
    assert seen == [12, 12, 6] * 2


def test_the_loop_averages_what_clients_make_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Plain] = []
    visits: list[int] = []

    def step(self: Plain, rows: torch.Tensor) -> None:
        made.append(self)
        visits.append(len(rows))
        with torch.no_grad():
            for value in self.module.parameters():
                value += 1.0

    monkeypatch.setattr(Plain, "step", step)
    rounds = loop(TINY, "cpu")
    torch.manual_seed(0)
    before = models.build("logistic", (1, 4, 4), 10)
    visits.clear()
    rounds(2)
    assert visits == [4, 4, 2] * 8
    # The last client starts from the mean after one round, 3 steps beyond the start, and takes 3 steps.
    for old, new in zip(before.parameters(), made[-1].module.parameters(), strict=True):
        torch.testing.assert_close(new, old + 6)


def test_a_plain_program_leaves_torch_as_it_found_it() -> None:
    plain = Plain(TINY, "cpu", best=False)
    torch.use_deterministic_algorithms(True)
    try:
        with plain.settings():
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_contestants_take_turns_and_the_slow_ones_fewer() -> None:
    order: list[tuple[str, int]] = []

    def contestant(name: str, seconds: float) -> Timed:
        def timed(count: int) -> float:
            order.append((name, count))
            return seconds * count

        return timed

    measured = compete(
        {"fast": contestant("fast", 0.1), "slow": contestant("slow", 3.0)},
        Turns(count=4, seconds=1.0, most=5.0, multiple=5),
    )
    assert measured["fast"]["seconds"] == pytest.approx(0.1)
    assert measured["fast"]["rounds_per_turn"] == 10
    assert len(measured["fast"]["all_seconds"]) == 4
    assert measured["slow"]["rounds_per_turn"] == 5
    assert len(measured["slow"]["all_seconds"]) == 2
    assert order[2:6] == [("fast", 10), ("slow", 5)] * 2


def test_a_contest_compares_what_a_sample_costs() -> None:
    others = {BOUND: centralised, "broken": broken}
    contest = Contest("tiny", {OURS: TINY, "half": replace(TINY, cohort=2)}, others, QUICK)
    rows = contest.measure("cpu", outside=lambda rounds: 0.01 * rounds)["rows"]
    assert rows.pop("broken") == {"failed": "ValueError: no such luck"}
    assert rows.keys() == {OURS, "half", BOUND, "outside"}
    assert rows["outside"]["samples_per_second"] == pytest.approx(40 / 0.01)
    for name, entry in rows.items():
        samples = 20 if name == "half" else 40
        assert entry["samples_per_second"] == pytest.approx(samples / entry["seconds"])
        assert entry["times"] == pytest.approx(rows[OURS]["samples_per_second"] / entry["samples_per_second"]), name
    assert 0 < rows[OURS]["start_up"] < rows[OURS]["ready"]
    assert rows[OURS]["peak_mib"] > 50
    assert "start_up" not in rows[BOUND]


def test_a_whole_run_is_evaluated_to_its_end() -> None:
    result = Whole("tiny", replace(TINY, test=10), 3, 2).measure("cpu")
    assert result["rounds"] == 3
    assert result["seconds"] > 0
    assert result["what"].endswith("evaluated on 10 samples every 2 rounds")


def test_growth_has_a_point_for_every_work() -> None:
    points = {n: replace(TINY, clients=n) for n in (2, 4)}
    result = Growth("clients", "clients", points, centralised, QUICK).measure("cpu")
    assert [[at for at, _ in series] for series in result["series"].values()] == [[2, 4], [2, 4]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_case_of_every_job_has_a_name_of_its_own_and_a_valid_config(device: str, tmp_path: Path) -> None:
    for job in JOBS:
        cases = JOBS[job](device)
        assert len({case.name for case in cases}) == len(cases) > 0
        for case in cases:
            for work in works(case):
                small = replace(work, clients=2, samples=1, cohort=1 if work.cohort else None, test=0)
                small.config(tmp_path, device)


def works(case: Case) -> Iterator[Work]:
    if isinstance(case, Contest):
        yield from case.runs.values()
    elif isinstance(case, Growth):
        yield from case.points.values()
    elif isinstance(case, Whole):
        yield case.work


def test_the_axis_of_models_counts_their_parameters() -> None:
    module = models.build("mlp", (1, 28, 28), 10, hidden=[32, 32])
    assert jobs._parameters(32) == sum(value.numel() for value in module.parameters())


# -- the command -----------------------------------------------------------------------------------------------------
class Broken:
    name = "broken"

    def measure(self, device: str) -> dict[str, Any]:
        raise ValueError("first line\nsecond line")


class Fine:
    name = "fine"

    def measure(self, device: str) -> dict[str, Any]:
        return {"what": "nothing", "rounds": 1, "seconds": 2.0, "peak_mib": 3.0}


@pytest.fixture
def two_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(JOBS, "mlp", lambda device: [Broken(), Fine()])
    monkeypatch.setitem(JOBS, "cnn", lambda device: [Fine()])


@pytest.mark.usefixtures("two_jobs")
def test_a_case_that_fails_is_reported_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert command.main(["--device", "cpu", "--jobs", "mlp", "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    assert kept["mlp"]["cases"]["broken"] == {"failed": "ValueError: first line"}
    assert kept["mlp"]["cases"]["fine"]["seconds"] == 2.0
    assert kept["mlp"]["command"] == "python -m benchmarks --device cpu --jobs mlp"
    assert kept["mlp"]["versions"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "ValueError: first line" in printed
    assert "fine: nothing" in printed


@pytest.mark.usefixtures("two_jobs")
def test_jobs_measured_before_stay_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"cnn": {"old": True}, "mlp": {"old": True}}))
    assert command.main(["--device", "cpu", "--jobs", "mlp", "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    assert kept["cnn"] == {"old": True}
    assert "old" not in kept["mlp"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--jobs", "mlp,chain"], "there is no job 'chain'; did you mean 'chains'?"),
        (["--out", "{file}"], "expected a file that this command wrote"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text("not json")
    assert command.main([word.format(file=file) for word in words]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_peers_are_measured_only_when_asked_for() -> None:
    assert command.chosen(None, peers=False) == [name for name in JOBS if name != "peers"]
    assert command.chosen("mlp", peers=True) == ["mlp", "peers"]
    assert command.chosen("peers", peers=True) == ["peers"]


def test_every_kind_of_result_has_a_table() -> None:
    shown = {name: show.table(name, case) for cases in MEASURED.values() for name, case in cases.items()}
    assert [len(shown[name].columns) for name in ("mlp", "cnn", "clients", "pfl, end to end")] == [7, 1, 3, 3]
    assert shown["mlp"].row_count == 3
    assert shown["clients"].row_count == 2


# -- peers -----------------------------------------------------------------------------------------------------------
PROGRAM = """
import time

from baton import Task, turns

assert len(Task.given().arrays()[0]) == 4
print("chatter of a library")
for rounds in turns("1.2.3"):
    print("more of it")
    time.sleep(0.001 * rounds)
    if rounds == 7:
        raise SystemExit("seven is too many")
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """One that needs no environment."""
    (tmp_path / "with_toy.py").write_text(PROGRAM)
    (tmp_path / "baton.py").write_text((process.HERE / "baton.py").read_text())
    monkeypatch.setattr(process, "HERE", tmp_path)
    monkeypatch.setattr(Peer, "interpreter", lambda self: Path(sys.executable))
    return Peer("toy", (), TINY, turns=QUICK)


def test_a_peer_takes_turns_and_ends_when_it_is_let_go(peer: Peer) -> None:
    with peer.started() as one:
        assert one.version == "1.2.3"
        assert 0.001 < one.timed(1) < one.timed(100)
    assert one.process.returncode == 0


def test_a_peer_is_measured_beside_equipoise_and_the_bound(peer: Peer) -> None:
    result = peer.measure("cpu")
    assert list(result["rows"]) == [OURS, BOUND, "toy"]
    assert result["version"] == "1.2.3"
    with pytest.raises(ConfigError, match="expected --device cpu"):
        peer.measure("cuda")


def test_a_peer_that_dies_is_quoted(peer: Peer) -> None:
    with peer.started() as one, pytest.raises(PeerError, match="its last line: seven is too many"):
        one.timed(7)
    assert one.process.returncode == 1


def test_a_peer_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LIMIT", 0.2)
    with pytest.raises(PeerError, match="had not answered"):
        Process([sys.executable, "-c", "import time; time.sleep(60)"], {})


def test_an_environment_is_made_once_and_again_when_it_needs_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def run(words: list[str]) -> None:
        calls.append(words[2])
        (tmp_path / "toy").mkdir(exist_ok=True)

    monkeypatch.setattr(process, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(process, "_run", run)
    assert Peer("toy", (("a",), ("b",))).interpreter() == tmp_path / "toy" / "bin" / "python"
    assert calls == ["venv", "pip", "pip"]
    Peer("toy", (("a",), ("b",))).interpreter()
    assert len(calls) == 3
    Peer("toy", (("a",),)).interpreter()
    assert len(calls) == 5


def test_an_environment_that_cannot_be_made_says_why() -> None:
    with pytest.raises(PeerError, match="failed: no such thing"):
        process._run([sys.executable, "-c", "raise SystemExit('no such thing')"])


def test_every_peer_has_its_program() -> None:
    for case in JOBS["peers"]("cpu"):
        assert (process.HERE / f"with_{case.name}.py").is_file()

"""Several runs at once: each gives what it gives alone, whatever the others are, do, or fail at."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equipoise import runs, tree
from equipoise.config import Config
from equipoise.engines import Stacked, together
from equipoise.engines.stacked import Call
from equipoise.engines.together import Joint, Seat, side_by_side
from equipoise.errors import TrainingError
from equipoise.federation import Federation
from equipoise.local import Local
from equipoise.method import Chain, FedAvg, Method
from equipoise.methods import Astraea, Climb, FedProx, FedRE, RatioLoss, Scaffold
from equipoise.network import Network
from equipoise.round import one_round, start
from equipoise.tree import Tree
from tests.federations import SIZES, dropout_cnn, federation, linear, norm_cnn
from tests.toys import Doubles, Even, Factor, Lanes, Looker, Square, StartLoss, Visits


def cell(seed: int, make: Callable[[], nn.Module] = linear, **options: Any) -> Federation:
    """Another seed is another model, other samples, and other draws; the layers are the same."""
    torch.manual_seed(seed)
    module = make()
    fed = federation(module, seed=seed, **options)
    return replace(fed, network=Network(module, make.__name__))


def logistic() -> nn.Module:
    return nn.Linear(5, 3)


@dataclass(frozen=True)
class Run:
    """What a run is, to be carried out alone or in company."""

    fed: Federation
    method: Method
    rounds: int = 3
    first: int = 0
    watch: Callable[[int], None] = lambda round: None

    def __call__(self, seat: Seat | None = None, **options: Any) -> Tree:
        engine = Stacked(self.fed, **{"precision": "float64", "width": 64, "seat": seat} | options)
        chain = Chain(self.method)
        state = start(self.fed, chain, engine)._replace(round=self.first)
        for _ in range(self.rounds):
            state, sums = one_round(state, self.fed, chain, engine)
            self.watch(state.round)
        end = {"params": state.params, "buffers": state.buffers, "slots": state.slots, "memory": engine.memory.save()}
        return {**end, "sums": {"weight": sums.weight, "clients": torch.tensor(sums.clients), "rows": sums.rows}}


def agree(got: Tree, want: Tree, tolerance: float = 1e-10) -> None:
    mine, others = tree.flatten(got), tree.flatten(want)
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        torch.testing.assert_close(
            value, others[name], rtol=tolerance, atol=tolerance, msg=lambda m, at=name: f"{at}: {m}"
        )


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each joint visit had."""
    seen: list[int] = []
    carry_out_all = Joint.carry_out_all

    def counted(self: Joint, calls: list[Call]) -> Any:
        seen.append(len(calls))
        return carry_out_all(self, calls)

    monkeypatch.setattr(Joint, "carry_out_all", counted)
    return seen


def company(works: list[Run], **options: Any) -> list[Tree]:
    found = dict(side_by_side([partial(work, **options) for work in works]))
    return [found[number] for number in range(len(works))]


CHAINS: list[Method] = [
    FedAvg(),
    Scaffold(),
    Climb(eta=0.5, every=1),
    Scaffold() + FedProx(mu=0.1),
    Lanes(((0, 3, -1), (1, 3, 5), (0, -1, 4))) + Factor(),
    Astraea(gamma=2, augment="repeat"),
    StartLoss() + Visits() + Looker(),
    Doubles() + Square() + Even(),
    RatioLoss(),
    FedRE(),
]


@pytest.mark.parametrize("method", CHAINS, ids=str)
def test_runs_in_company_give_what_they_give_alone(method: Method, stacked: list[int]) -> None:
    works = [
        Run(cell(3, cohort=0), method, rounds=2),
        Run(cell(4, cohort=4), method, rounds=1),
        Run(cell(5, cohort=3, sizes=(9, 4, 7, 7, 1, 30)), method, rounds=3),
    ]
    for got, work in zip(company(works), works, strict=True):
        agree(got, work())
    assert {2, 3} <= set(stacked)  # runs that have ended are no longer waited for


@pytest.mark.parametrize("make", [norm_cnn, dropout_cnn])
def test_buffers_and_dropout_are_each_runs_own(make: Callable[[], nn.Module], stacked: list[int]) -> None:
    local = Local(lr=0.05, batch=4)
    works = [Run(cell(seed, make, shape=(1, 6, 6), local=local), Scaffold()) for seed in (1, 2)]
    for got, work in zip(company(works), works, strict=True):
        agree(got, work(), 1e-9)
    assert stacked


def test_runs_of_one_pool_share_it_and_may_be_in_different_rounds(stacked: list[int]) -> None:
    local = Local(lr=0.3, batch=4, schedule="step", gamma=0.5, every=2)
    pool = cell(3, local=local)
    fewer = replace(pool, offsets=torch.tensor([0, 20, 25, 54]), indices=pool.indices.flip(0), cohort=2, seed=8)
    works = [Run(pool, Scaffold()), Run(fewer, Scaffold(), first=5)]
    for got, work in zip(company(works), works, strict=True):
        agree(got, work())
    assert stacked == [2, 2, 2]
    engines = [Stacked(fed) for fed in (pool, fewer, cell(4))]
    assert Joint(engines[:2]).x is pool.x
    assert len(Joint(engines).x) == len(pool.x) + len(engines[2].x)


def test_the_same_company_gives_the_same_bits() -> None:
    works = [Run(cell(seed, sizes=(9, *SIZES)), Scaffold(), rounds=seed) for seed in (1, 2, 3)]
    one, other = company(works, precision="float32"), company(works, precision="float32")
    for mine, again in zip(one, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(mine), tree.leaves(again), strict=True))


def test_visits_of_different_kinds_are_not_mixed(stacked: list[int]) -> None:
    even = (8, 8, 8)
    slow = cell(3, sizes=even, local=Local(lr=0.01, batch=4))
    other = replace(cell(5, sizes=even), network=Network(linear(), "another"))
    works = [
        Run(cell(1, sizes=even), FedAvg()),
        Run(cell(2, sizes=even), Scaffold()),
        Run(slow, FedAvg()),
        Run(other, FedAvg()),
        Run(cell(4, sizes=even), FedAvg()),
    ]
    for got, work in zip(company(works), works, strict=True):
        agree(got, work())
    assert stacked == [2, 2, 2]


def test_a_stack_is_no_wider_than_a_run_may_make_it(stacked: list[int]) -> None:
    works = [Run(cell(seed, sizes=(8,) * 6, cohort=4), FedAvg(), rounds=2) for seed in range(4)]
    for got, work in zip(company(works, width=9), works, strict=True):
        agree(got, work())
    assert stacked == [2, 2, 2, 2]


@pytest.mark.parametrize("method", [Scaffold(), Lanes(((0, 1),)) + Looker()], ids=str)
def test_programs_of_several_runs_are_single_graphs(
    method: Method, stacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Joint.__init__

    def compile_everything(self: Joint, engines: list[Stacked]) -> None:
        made(self, engines)
        self.compile_around = True

    alone: list[Call] = []
    monkeypatch.setattr(Joint, "__init__", compile_everything)
    monkeypatch.setattr(together, "_alone", lambda call: alone.append(call) or call.engine.carry_out(call))
    small = {"sizes": (4, 4), "cohort": 0, "local": Local(batch=4)}
    works = [Run(cell(seed, logistic, **small), method, rounds=1) for seed in (1, 2)]
    for got, work in zip(company(works, compile="eager"), works, strict=True):
        agree(got, work())
    assert stacked == [2]
    assert not alone  # as what cannot be a single graph would be


# -- errors


def until_error(endings: Iterable[tuple[int, Any]]) -> tuple[dict[int, Any], Exception]:
    """What came before the error, and the error."""
    found: dict[int, Any] = {}
    try:
        for number, end in endings:
            found[number] = end
    except Exception as error:
        return found, error
    pytest.fail("there was no error")


def test_not_a_number_is_the_runs_own() -> None:
    bad = cell(2, cohort=0)
    bad.x[bad.indices[bad.offsets[3]]] = torch.inf
    works = [Run(cell(1), Scaffold()), Run(bad, Scaffold()), Run(cell(3), Scaffold())]
    found, error = until_error(side_by_side(works))
    assert isinstance(error, TrainingError)
    assert "round 1: the training of client 3 turned into not-a-number" in str(error)
    assert found.keys() == {0, 2}
    for number, got in found.items():
        agree(got, works[number]())


def test_a_joint_visit_that_fails_is_tried_in_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    carry_out_all = Joint.carry_out_all

    def crowded(self: Joint, calls: list[Call]) -> Any:
        tried.append(len(calls))
        if len(calls) > 2:
            raise torch.OutOfMemoryError("three are too many")
        return carry_out_all(self, calls)

    monkeypatch.setattr(Joint, "carry_out_all", crowded)
    works = [Run(cell(seed), FedAvg(), rounds=2) for seed in range(5)]
    for got, work in zip(company(works), works, strict=True):
        agree(got, work())
    assert tried[:3] == [5, 2, 2]
    assert max(tried[1:]) == 2  # and not tried again


def test_of_runs_that_fail_together_each_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    works = [Run(cell(seed), FedAvg()) for seed in range(3)]
    guilty, carry_out = works[1].fed, Stacked.carry_out

    def fail(self: Joint, calls: list[Call]) -> Any:
        raise TrainingError("one of them")

    def alone(self: Stacked, call: Call) -> Any:
        if self.fed is guilty:
            raise TrainingError("this one")
        return carry_out(self, call)

    monkeypatch.setattr(Joint, "carry_out_all", fail)
    monkeypatch.setattr(Stacked, "carry_out", alone)
    with pytest.warns(UserWarning, match="3 runs do not go at once, and now in smaller groups: one of them"):
        found, error = until_error(side_by_side(works))
    assert str(error) == "this one"
    assert found.keys() == {0, 2}


def raised_inside(round: int) -> None:
    if round == 2:
        raise KeyboardInterrupt


def sent_to_the_process(round: int) -> None:
    if round >= 2:  # more than once: Python ignores what is raised while it collects garbage
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whatever the test before has made of Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("interrupt", [raised_inside, sent_to_the_process])
def test_an_interrupt_ends_all_where_they_are(interrupt: Callable[[int], None]) -> None:
    left: list[str] = []

    def tidy(work: Run, name: str, seat: Seat | None) -> Tree:
        try:
            return work(seat)
        finally:
            left.append(name)

    reached: list[int] = []
    works = [
        Run(cell(1), FedAvg(), rounds=50, watch=reached.append),
        Run(cell(2), FedAvg(), rounds=50, watch=interrupt),
    ]
    with pytest.raises(KeyboardInterrupt):
        list(side_by_side([partial(tidy, work, str(number)) for number, work in enumerate(works)]))
    assert sorted(left) == ["0", "1"]
    assert max(reached) < 50


def test_whoever_looks_away_ends_the_runs() -> None:
    reached: list[int] = []
    before = threading.active_count()
    works = [Run(cell(1), FedAvg(), rounds=1), Run(cell(2), FedAvg(), rounds=100, watch=reached.append)]
    with closing(side_by_side(works)) as ending:
        assert next(ending)[0] == 0
        assert threading.active_count() > before
    assert reached == []
    assert threading.active_count() == before


def test_a_single_run_needs_no_company() -> None:
    seats: list[Seat | None] = []
    assert list(side_by_side([lambda seat: seats.append(seat) or 7])) == [(0, 7)]  # type: ignore[func-returns-value]
    assert seats == [None]


# -- run folders


def config(seed: int, method: str = "scaffold") -> Config:
    return Config.from_dict({
        "method": method,
        "data": {
            "source": "digits",
            "imbalance": {"kind": "step", "rho": 2 + seed, "minority": [0]},
            "partition": {"kind": "dirichlet", "clients": 6, "alpha": 1.0},
        },
        "model": {"name": "logistic"},
        "local": {"lr": 0.1, "batch": 64},
        "train": {
            "rounds": 3, "cohort": 4, "threads": 1, "device": "cpu", "precision": "float64", "seed": seed,
            "checkpoint_seconds": 0.0,
        },
    })  # fmt: skip


def carried(configs: list[Config], out: Path, watches: list[runs.Watch]) -> Iterator[tuple[int, Any]]:
    works = [
        partial(runs.run, config, out / str(number), watch)
        for number, (config, watch) in enumerate(zip(configs, watches, strict=True))
    ]
    return side_by_side(works)


def plan(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return content


@pytest.mark.parametrize("method", ["scaffold", "local", "centralised"])
def test_run_folders_are_filled_as_by_runs_alone(method: str, tmp_path: Path, stacked: list[int]) -> None:
    configs = [config(seed, method) for seed in (0, 1)]
    for number, result in carried(configs, tmp_path, [runs.Watch()] * 2):
        alone = runs.run(configs[number], tmp_path / f"alone-{number}")
        assert result["last"]["confusion"] == alone["last"]["confusion"]
        assert result["last"].get("loss", 0) == pytest.approx(alone["last"].get("loss", 0), rel=1e-10)
        assert (plan(tmp_path / str(number))["together"], plan(tmp_path / f"alone-{number}")["together"]) == (2, 1)
    assert stacked == [2, 2, 2]


def test_a_run_is_stopped_alone_and_resumed_alone(tmp_path: Path) -> None:
    configs = [config(seed) for seed in (0, 1, 2)]
    watches = [runs.Watch(), runs.Watch(stop=lambda: True), runs.Watch()]
    found, error = until_error(carried(configs, tmp_path, watches))
    assert isinstance(error, runs.Stopped)
    assert found.keys() == {0, 2}
    said: list[str] = []
    stopped = runs.resume(tmp_path / "1", runs.Watch(say=said.append))
    assert said == ["together 3 is now 1: the result agrees with the uncut run to tolerance, not bit by bit"]
    whole = runs.run(configs[1], tmp_path / "whole")
    assert stopped["last"]["round"] == 3
    assert stopped["last"]["loss"] == pytest.approx(whole["last"]["loss"], rel=1e-10)
    assert plan(tmp_path / "1")["together"] == 1
    assert all((tmp_path / number / "result.json").exists() for number in ("0", "2"))

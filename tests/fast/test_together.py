"""Several runs at once: each gives the result that it gives alone, even if others differ from it or fail."""

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

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.errors import TrainingError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.network import Network
from equipoise.core.round import one_round, start
from equipoise.core.tree import Tree
from equipoise.fast import together
from equipoise.fast.accelerated import Call
from equipoise.fast.together import JointEngine, Seat, side_by_side
from equipoise.methods import Astraea, Climb, FedProx, FedRE, RatioLoss, Scaffold
from equipoise.runs import run as runs
from equipoise.runs.config import Config
from tests.federations import SIZES, dropout_cnn, federation, linear, norm_cnn
from tests.toys import Doubles, Even, Factor, Lanes, Looker, Square, StartLoss, Visits


def cell(seed: int, make: Callable[[], nn.Module] = linear, **options: Any) -> Federation:
    """A federation whose model, samples and draws depend on the seed; the layers are the same for all seeds."""
    torch.manual_seed(seed)
    module = make()
    fed = federation(module, seed=seed, **options)
    return replace(fed, network=Network(module, make.__name__))


def logistic() -> nn.Module:
    return nn.Linear(5, 3)


@dataclass(frozen=True)
class Run:
    """A run, which may be carried out alone or together with others."""

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
    """How many runs were trained in each joint visit."""
    seen: list[int] = []
    train_all = JointEngine.train_all

    def counted(self: JointEngine, calls: list[Call]) -> Any:
        seen.append(len(calls))
        return train_all(self, calls)

    monkeypatch.setattr(JointEngine, "train_all", counted)
    return seen


def run_together(works: list[Run], **options: Any) -> list[Tree]:
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
def test_runs_at_once_agree_with_single_runs(method: Method, stacked: list[int]) -> None:
    works = [
        Run(cell(3, cohort=0), method, rounds=2),
        Run(cell(4, cohort=4), method, rounds=1),
        Run(cell(5, cohort=3, sizes=(9, 4, 7, 7, 1, 30)), method, rounds=3),
    ]
    for got, work in zip(run_together(works), works, strict=True):
        agree(got, work())
    assert {2, 3} <= set(stacked)  # runs that have ended are no longer waited for


@pytest.mark.parametrize("make", [norm_cnn, dropout_cnn])
def test_every_run_has_its_own_buffers_and_dropout(make: Callable[[], nn.Module], stacked: list[int]) -> None:
    local = Local(lr=0.05, batch=4)
    works = [Run(cell(seed, make, shape=(1, 6, 6), local=local), Scaffold()) for seed in (1, 2)]
    for got, work in zip(run_together(works), works, strict=True):
        agree(got, work(), 1e-9)
    assert stacked


def test_runs_on_the_same_samples_store_them_once_and_may_be_in_different_rounds(stacked: list[int]) -> None:
    local = Local(lr=0.3, batch=4, schedule="step", gamma=0.5, every=2)
    pool = cell(3, local=local)
    fewer = replace(pool, offsets=torch.tensor([0, 20, 25, 54]), indices=pool.indices.flip(0), cohort=2, seed=8)
    works = [Run(pool, Scaffold()), Run(fewer, Scaffold(), first=5)]
    for got, work in zip(run_together(works), works, strict=True):
        agree(got, work())
    assert stacked == [2, 2, 2]
    engines = [Stacked(fed) for fed in (pool, fewer, cell(4))]
    assert JointEngine(engines[:2]).x is pool.x
    assert len(JointEngine(engines).x) == len(pool.x) + len(engines[2].x)


def test_the_same_runs_at_once_give_the_same_bits_again() -> None:
    works = [Run(cell(seed, sizes=(9, *SIZES)), Scaffold(), rounds=seed) for seed in (1, 2, 3)]
    one, other = run_together(works, precision="float32"), run_together(works, precision="float32")
    for mine, again in zip(one, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(mine), tree.leaves(again), strict=True))


def test_runs_with_other_methods_settings_or_networks_are_not_stacked(stacked: list[int]) -> None:
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
    for got, work in zip(run_together(works), works, strict=True):
        agree(got, work())
    assert stacked == [2, 2, 2]


def test_a_joint_stack_is_no_wider_than_the_width_of_a_run(stacked: list[int]) -> None:
    works = [Run(cell(seed, sizes=(8,) * 6, cohort=4), FedAvg(), rounds=2) for seed in range(4)]
    for got, work in zip(run_together(works, width=9), works, strict=True):
        agree(got, work())
    assert stacked == [2, 2, 2, 2]


@pytest.mark.parametrize("method", [Scaffold(), Lanes(((0, 1),)) + Looker()], ids=str)
def test_programs_of_several_runs_are_single_graphs(
    method: Method, stacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = JointEngine.__init__

    def compile_everything(self: JointEngine, engines: list[Stacked]) -> None:
        made(self, engines)
        self.compile_around = True

    alone: list[Call] = []
    monkeypatch.setattr(JointEngine, "__init__", compile_everything)
    monkeypatch.setattr(together, "_train_alone", lambda call: alone.append(call) or call.engine.train_alone(call))
    small = {"sizes": (4, 4), "cohort": 0, "local": Local(batch=4)}
    works = [Run(cell(seed, logistic, **small), method, rounds=1) for seed in (1, 2)]
    for got, work in zip(run_together(works, compile="eager"), works, strict=True):
        agree(got, work())
    assert stacked == [2]
    assert not alone  # a program that is no single graph would fail, and its runs would be trained alone


# -- errors


def until_error(endings: Iterable[tuple[int, Any]]) -> tuple[dict[int, Any], Exception]:
    """The results that came before the error, and the error."""
    found: dict[int, Any] = {}
    try:
        for number, end in endings:
            found[number] = end
    except Exception as error:
        return found, error
    pytest.fail("there was no error")


def test_a_run_that_turns_into_not_a_number_fails_alone() -> None:
    bad = cell(2, cohort=0)
    bad.x[bad.indices[bad.offsets[3]]] = torch.inf
    works = [Run(cell(1), Scaffold()), Run(bad, Scaffold()), Run(cell(3), Scaffold())]
    found, error = until_error(side_by_side(works))
    assert isinstance(error, TrainingError)
    assert "round 1: the training of client 3 turned into not-a-number" in str(error)
    assert found.keys() == {0, 2}
    for number, got in found.items():
        agree(got, works[number]())


def test_a_joint_visit_that_needs_too_much_memory_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    train_all = JointEngine.train_all

    def out_of_memory(self: JointEngine, calls: list[Call]) -> Any:
        tried.append(len(calls))
        if len(calls) > 2:
            raise torch.OutOfMemoryError("three are too many")
        return train_all(self, calls)

    monkeypatch.setattr(JointEngine, "train_all", out_of_memory)
    works = [Run(cell(seed), FedAvg(), rounds=2) for seed in range(5)]
    for got, work in zip(run_together(works), works, strict=True):
        agree(got, work())
    assert tried[:3] == [5, 2, 2]
    assert max(tried[1:]) == 2  # larger groups are not tried again


def test_if_a_joint_visit_fails_only_the_run_with_the_error_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    works = [Run(cell(seed), FedAvg()) for seed in range(3)]
    guilty, train_alone = works[1].fed, Stacked.train_alone

    def fail(self: JointEngine, calls: list[Call]) -> Any:
        raise TrainingError("one of them")

    def alone(self: Stacked, call: Call) -> Any:
        if self.fed is guilty:
            raise TrainingError("this one")
        return train_alone(self, call)

    monkeypatch.setattr(JointEngine, "train_all", fail)
    monkeypatch.setattr(Stacked, "train_alone", alone)
    with pytest.warns(
        UserWarning, match="training 3 runs at once failed, so that smaller groups are tried: one of them"
    ):
        found, error = until_error(side_by_side(works))
    assert str(error) == "this one"
    assert found.keys() == {0, 2}


def raised_inside(round: int) -> None:
    if round == 2:
        raise KeyboardInterrupt


def sent_to_the_process(round: int) -> None:
    if round >= 2:  # more than once, since Python ignores exceptions that are raised while it collects garbage
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restores Python's handling of Ctrl-C, which a test before may have changed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("interrupt", [raised_inside, sent_to_the_process])
def test_an_interrupt_ends_all_runs_and_lets_them_tidy_up(interrupt: Callable[[int], None]) -> None:
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


def test_closing_the_generator_ends_the_runs() -> None:
    reached: list[int] = []
    before = threading.active_count()
    works = [Run(cell(1), FedAvg(), rounds=1), Run(cell(2), FedAvg(), rounds=100, watch=reached.append)]
    with closing(side_by_side(works)) as ending:
        assert next(ending)[0] == 0
        assert threading.active_count() > before
    assert reached == []
    assert threading.active_count() == before


def test_a_single_run_gets_no_seat() -> None:
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


def run_side_by_side(configs: list[Config], out: Path, watches: list[runs.Watch]) -> Iterator[tuple[int, Any]]:
    works = [
        partial(runs.run, config, out / str(number), watch)
        for number, (config, watch) in enumerate(zip(configs, watches, strict=True))
    ]
    return side_by_side(works)


def plan(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return content


@pytest.mark.parametrize("method", ["scaffold", "local", "centralised"])
def test_runs_at_once_write_the_same_folders_as_single_runs(method: str, tmp_path: Path, stacked: list[int]) -> None:
    configs = [config(seed, method) for seed in (0, 1)]
    for number, result in run_side_by_side(configs, tmp_path, [runs.Watch()] * 2):
        alone = runs.run(configs[number], tmp_path / f"alone-{number}")
        assert result["last"]["confusion"] == alone["last"]["confusion"]
        assert result["last"].get("loss", 0) == pytest.approx(alone["last"].get("loss", 0), rel=1e-10)
        assert (plan(tmp_path / str(number))["together"], plan(tmp_path / f"alone-{number}")["together"]) == (2, 1)
    assert stacked == [2, 2, 2]


def test_one_of_several_runs_can_be_stopped_and_resumed_alone(tmp_path: Path) -> None:
    configs = [config(seed) for seed in (0, 1, 2)]
    watches = [runs.Watch(), runs.Watch(stop=lambda: True), runs.Watch()]
    found, error = until_error(run_side_by_side(configs, tmp_path, watches))
    assert isinstance(error, runs.Stopped)
    assert found.keys() == {0, 2}
    said: list[str] = []
    stopped = runs.resume(tmp_path / "1", runs.Watch(notify=said.append))
    assert said == [
        "together 3 is now 1: the result equals that of an uninterrupted run up to rounding, not bit by bit"
    ]
    whole = runs.run(configs[1], tmp_path / "whole")
    assert stopped["last"]["round"] == 3
    assert stopped["last"]["loss"] == pytest.approx(whole["last"]["loss"], rel=1e-10)
    assert plan(tmp_path / "1")["together"] == 1
    assert all((tmp_path / number / "result.json").exists() for number in ("0", "2"))

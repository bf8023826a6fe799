"""Recorded programs, by a stand-in that has no GPU: what lies where, and that nothing is overwritten too early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import tree
from equipoise.engines import Serial, Stacked, graphs, parts, programs, stacked
from equipoise.engines.graphs import Graphs, Program
from equipoise.local import Local
from equipoise.method import FedAvg, Method
from equipoise.methods import FedAdam, Scaffold
from equipoise.tree import Tree
from tests.federations import federation
from tests.test_engines import distance, play
from tests.test_together import Run, agree, cell, company
from tests.toys import Lanes, Visits


class StandIn(graphs._Recorded):
    """Like a CUDA graph it reads its inputs where they lay when it was recorded, and writes to one place always."""

    def __init__(self, program: Program, inputs: Tree) -> None:
        self.program, self.inputs, self.places = program, inputs, list(tree.leaves(inputs))
        given = {leaf.untyped_storage().data_ptr() for leaf in self.places}
        made = program(inputs)
        fresh = [
            x if x.untyped_storage().data_ptr() in given else torch.full_like(x, 7) for x in graphs._tensors(made)
        ]
        self.outputs = _like(made, iter(fresh))
        self.writes = {leaf.untyped_storage().data_ptr() for leaf in fresh}
        self.graph = self  # type: ignore[assignment]

    def replay(self) -> None:
        made = [x.clone() for x in graphs._tensors(self.program(self.inputs))]
        for mine, new in zip(graphs._tensors(self.outputs), made, strict=True):
            mine.copy_(new)


def _like(found: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(found, Tensor):
        return next(tensors)
    if isinstance(found, dict):
        return {name: _like(part, tensors) for name, part in found.items()}
    parts = [_like(part, tensors) for part in found]
    return type(found)(*parts) if hasattr(found, "_fields") else parts


def recording(device: torch.device) -> Graphs:
    made = Graphs(device)
    made.recording = True
    return made


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Recorded", StandIn)


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Engines that record, on a device that trains so many clients in the time of one."""

    def given(crowd: int) -> None:
        monkeypatch.setattr(stacked, "Graphs", recording)
        monkeypatch.setattr(Stacked, "_few", True)
        monkeypatch.setattr(Stacked, "_crowd", lambda engine, local: crowd)
        monkeypatch.setattr(parts, "HANDFUL", 2)  # so that small tracks shrink, too
        # Of at most eight clients samples are looked up ahead: one of five features in float64 for each.
        monkeypatch.setattr(stacked, "READY", programs.AHEAD * 8 * 5 * 8)
        monkeypatch.setattr(Graphs, "forget", lambda *_: None)  # so that one can see what there was

    return given


def kinds(engine: Stacked) -> set[str]:
    return {name[0] for name, _ in engine.graphs.recorded}  # type: ignore[misc]


def recorded_tracks(engine: Stacked) -> set[tuple[int, ...]]:
    """By their first clients, those that went side by side."""
    names = [name for name, _ in engine.graphs.recorded]  # type: ignore[misc]
    return {tuple(track for track, *_ in key) for kind, key, *_ in names if kind == "advance"}


UNEVEN = (*(3, 20, 9, 25, 14, 30) * 3, 37, 12)
METHODS: list[Method] = [
    FedAvg(),
    Scaffold() + FedAdam(lr=0.05),
    Visits(),
    Lanes((tuple(range(20)), (0, -1, 2, 3, *[-1] * 15, 19))),
]


WAYS = {  # how many clients there are, and are a crowd; and what then goes side by side
    "quarters": (0, 1, {(0,), (5,), (10,), (15,)}),
    "quarters of those drawn": (16, 1, {(0,), (4,), (8,), (12,)}),
    "two tracks": (0, 3, {(0, 4)}),
    "two tracks of those drawn": (16, 3, {(0, 4)}),
    "two tracks in one pace": (0, 100, {(0, 4)}),
    "one track": (12, 3, {(0,)}),
}


@pytest.mark.parametrize(("cohort", "crowd", "tracks"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_recorded_programs_give_the_same(
    method: Method, cohort: int, crowd: int, tracks: set[tuple[int, ...]], like_a_gpu: Callable[[int], None]
) -> None:
    fed = federation(sizes=UNEVEN, cohort=cohort, local=Local(lr=0.05, batch=1))
    one, _ = play(fed, method, Serial(fed, precision="float64"), 3)
    like_a_gpu(crowd)
    engine = Stacked(fed, precision="float64", width=64)
    other, _ = play(fed, method, engine, 3)
    assert distance(one.params, other.params) < 1e-12
    if not isinstance(method, Lanes):  # which are everybody, whoever is drawn
        assert recorded_tracks(engine) >= tracks
        assert ("visit" in kinds(engine)) == (cohort == 0)


@pytest.mark.parametrize("crowd", [3, 4], ids=["in quarters", "in two tracks"])
@pytest.mark.parametrize("method", [FedAvg(), Scaffold() + FedAdam(lr=0.05), Visits()], ids=str)
def test_recorded_programs_of_several_runs_give_the_same(
    method: Method, crowd: int, like_a_gpu: Callable[[int], None]
) -> None:
    options: dict[str, Any] = {"sizes": UNEVEN, "cohort": 0, "local": Local(lr=0.05, batch=1)}
    works = [Run(cell(seed, **options), method, rounds) for seed, rounds in ((1, 4), (2, 2), (3, 4))]
    alone = [work() for work in works]
    like_a_gpu(crowd)
    for got, want in zip(company(works), alone, strict=True):
        agree(got, want)


def test_a_visit_that_comes_again_is_one_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "Graphs", recording)
    monkeypatch.setattr(Stacked, "_few", True)
    fed = federation(sizes=UNEVEN, cohort=0, local=Local(lr=0.05, batch=1))
    engine = Stacked(fed, precision="float64", width=64)
    found = [kinds(engine) for _ in map(partial(play, fed, FedAvg(), engine), (1, 1, 1))]
    assert found == [{"begin", "advance", "end"}, {"visit"}, {"visit"}]
    monkeypatch.setattr(stacked, "LONGEST", 30)
    long = Stacked(fed, precision="float64", width=64)
    play(fed, FedAvg(), long, 3)
    assert kinds(long) == {"begin", "advance", "end"}


def test_what_a_recorded_program_is_made_of_is_not_recorded_again() -> None:
    made = recording(torch.device("cpu"))

    def inner(given: Tree) -> Tree:
        return {"x": given["x"] + 1}

    def outer(given: Tree) -> Tree:
        return made.run("inner", inner, made.run("inner", inner, given, at_once=True), at_once=True)  # type: ignore[no-any-return]

    for number in range(3):
        assert made.run("outer", outer, {"x": torch.full((1,), number)}, at_once=True)["x"] == number + 2
    assert [name for name, _ in made.recorded] == ["outer"]  # type: ignore[misc]


def test_the_least_recently_used_are_forgotten() -> None:
    made = recording(torch.device("cpu"))
    made.most = 2
    for name in ("a", "b", "a", "c"):
        found = made.run(name, lambda given: given["x"] + 1, {"x": torch.ones(1)}, at_once=True)
        assert found == 2
    assert [name for name, _ in made.recorded] == ["a", "c"]  # type: ignore[misc]


def test_what_is_recorded_at_the_second_sight_is_computed_at_the_first() -> None:
    made = recording(torch.device("cpu"))
    for number in range(3):
        assert made.run("a", lambda given: given["x"] * 2, {"x": torch.full((1,), number)}) == 2 * number
        assert len(made.recorded) == min(number, 1)


def test_branches_begin_together_and_what_follows_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            seen.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        seen.append(f"on {stream.name}")
        yield
        seen.append(f"off {stream.name}")

    made = Graphs(torch.device("cpu"))
    programs = [lambda: seen.append("long") or 1, lambda: seen.append("short") or 2]  # type: ignore[func-returns-value]
    assert made.branches(programs) == [1, 2]
    assert seen == ["long", "short"]
    seen.clear()
    made.side = Stream("side")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    assert made.branches(programs) == [1, 2]
    assert seen == ["side waits for main", "on side", "long", "off side", "short", "main waits for side"]
    seen.clear()
    assert made.branches(programs[:1]) == [1]
    assert seen == ["long"]

"""Recorded programs, with a stand-in for CUDA graphs: results are the same, and nothing is overwritten too early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.tree import Tree
from equipoise.engines import Serial
from equipoise.fast import accelerated, graphs, programs, schedule
from equipoise.fast.graphs import Graphs, Program
from equipoise.methods import FedAdam, Scaffold
from tests.engines.test_engines import distance, play
from tests.fast.test_together import Run, agree, cell, run_together
from tests.federations import federation
from tests.toys import Lanes, Visits


class StandIn(graphs._Recorded):
    """Like a CUDA graph, it reads and writes at the addresses it was recorded with."""

    def __init__(self, program: Program, inputs: Tree) -> None:
        self.program, self.inputs, self.static_inputs = program, inputs, list(tree.leaves(inputs))
        given = {leaf.untyped_storage().data_ptr() for leaf in self.static_inputs}
        made = program(inputs)
        fresh = [
            x if x.untyped_storage().data_ptr() in given else torch.full_like(x, 7) for x in graphs._tensors(made)
        ]
        self.outputs = _like(made, iter(fresh))
        self.output_storages = {leaf.untyped_storage().data_ptr() for leaf in fresh}
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
    made.enabled = True
    return made


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Recorded", StandIn)


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes engines record, as if on a GPU that trains so many clients in the time of one."""

    def given(latency_clients: int) -> None:
        monkeypatch.setattr(accelerated, "Graphs", recording)
        monkeypatch.setattr(Stacked, "_few_shapes", True)
        monkeypatch.setattr(Stacked, "_latency_clients", lambda engine, local: latency_clients)
        monkeypatch.setattr(schedule, "SMALLEST_TRACK", 2)  # so that small tracks shrink, too
        # Samples are looked up ahead for at most eight clients, with one sample of five float64 features each.
        monkeypatch.setattr(accelerated, "AHEAD_BYTES", programs.AHEAD * 8 * 5 * 8)
        monkeypatch.setattr(Graphs, "forget", lambda *_: None)  # so that tests see all recordings

    return given


def kinds(engine: Stacked) -> set[str]:
    """Which programs were recorded: parts of a visit, or visits as a whole."""
    return {name[0] for name, _ in engine.graphs.recorded}  # type: ignore[misc]


def recorded_tracks(engine: Stacked) -> set[tuple[int, ...]]:
    """The tracks that ran side by side in each recorded program, by the numbers of their first clients."""
    names = [name for name, _ in engine.graphs.recorded]  # type: ignore[misc]
    return {tuple(track for track, *_ in key) for kind, key, *_ in names if kind == "advance"}


UNEVEN = (*(3, 20, 9, 25, 14, 30) * 3, 37, 12)
METHODS: list[Method] = [
    FedAvg(),
    Scaffold() + FedAdam(lr=0.05),
    Visits(),
    Lanes((tuple(range(20)), (0, -1, 2, 3, *[-1] * 15, 19))),
]


WAYS = {  # the cohort (0: all clients), how many clients train in the time of one, and the tracks that follow
    "quarters": (0, 1, {(0,), (5,), (10,), (15,)}),
    "quarters of those drawn": (16, 1, {(0,), (4,), (8,), (12,)}),
    "two tracks": (0, 3, {(0, 4)}),
    "two tracks of those drawn": (16, 3, {(0, 4)}),
    "two tracks at equal speed": (0, 100, {(0, 4)}),
    "one track": (12, 3, {(0,)}),
}


@pytest.mark.parametrize(("cohort", "latency_clients", "tracks"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_recorded_programs_agree_with_the_serial_engine(
    method: Method, cohort: int, latency_clients: int, tracks: set[tuple[int, ...]], like_a_gpu: Callable[[int], None]
) -> None:
    fed = federation(sizes=UNEVEN, cohort=cohort, local=Local(lr=0.05, batch=1))
    one, _ = play(fed, method, Serial(fed, precision="float64"), 3)
    like_a_gpu(latency_clients)
    engine = Stacked(fed, precision="float64", width=64)
    other, _ = play(fed, method, engine, 3)
    assert distance(one.params, other.params) < 1e-12
    if not isinstance(method, Lanes):  # its plan takes all clients, whatever the cohort
        assert recorded_tracks(engine) >= tracks
        assert ("visit" in kinds(engine)) == (cohort == 0)


@pytest.mark.parametrize("latency_clients", [3, 4], ids=["in quarters", "in two tracks"])
@pytest.mark.parametrize("method", [FedAvg(), Scaffold() + FedAdam(lr=0.05), Visits()], ids=str)
def test_recorded_programs_of_several_runs_agree_with_single_runs(
    method: Method, latency_clients: int, like_a_gpu: Callable[[int], None]
) -> None:
    options: dict[str, Any] = {"sizes": UNEVEN, "cohort": 0, "local": Local(lr=0.05, batch=1)}
    works = [Run(cell(seed, **options), method, rounds) for seed, rounds in ((1, 4), (2, 2), (3, 4))]
    alone = [work() for work in works]
    like_a_gpu(latency_clients)
    for got, want in zip(run_together(works), alone, strict=True):
        agree(got, want)


def test_a_visit_that_repeats_is_recorded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerated, "Graphs", recording)
    monkeypatch.setattr(Stacked, "_few_shapes", True)
    fed = federation(sizes=UNEVEN, cohort=0, local=Local(lr=0.05, batch=1))
    engine = Stacked(fed, precision="float64", width=64)
    found = [kinds(engine) for _ in map(partial(play, fed, FedAvg(), engine), (1, 1, 1))]
    assert found == [{"begin", "advance", "end"}, {"visit"}, {"visit"}]
    monkeypatch.setattr(accelerated, "LONGEST_RECORDED", 30)
    long = Stacked(fed, precision="float64", width=64)
    play(fed, FedAvg(), long, 3)
    assert kinds(long) == {"begin", "advance", "end"}


def test_programs_inside_a_recorded_program_are_not_recorded_by_themselves() -> None:
    made = recording(torch.device("cpu"))

    def inner(given: Tree) -> Tree:
        return {"x": given["x"] + 1}

    def outer(given: Tree) -> Tree:
        return made.run("inner", inner, made.run("inner", inner, given, at_once=True), at_once=True)  # type: ignore[no-any-return]

    for number in range(3):
        assert made.run("outer", outer, {"x": torch.full((1,), number)}, at_once=True)["x"] == number + 2
    assert [name for name, _ in made.recorded] == ["outer"]  # type: ignore[misc]


def test_the_least_recently_used_recordings_are_dropped() -> None:
    made = recording(torch.device("cpu"))
    made.capacity = 2
    for name in ("a", "b", "a", "c"):
        found = made.run(name, lambda given: given["x"] + 1, {"x": torch.ones(1)}, at_once=True)
        assert found == 2
    assert [name for name, _ in made.recorded] == ["a", "c"]  # type: ignore[misc]


def test_a_program_is_run_the_first_time_and_recorded_the_second() -> None:
    made = recording(torch.device("cpu"))
    for number in range(3):
        assert made.run("a", lambda given: given["x"] * 2, {"x": torch.full((1,), number)}) == 2 * number
        assert len(made.recorded) == min(number, 1)


def test_branches_start_together_and_the_main_stream_waits_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
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
    made.side_stream = Stream("side")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    assert made.branches(programs) == [1, 2]
    assert seen == ["side waits for main", "on side", "long", "off side", "short", "main waits for side"]
    seen.clear()
    assert made.branches(programs[:1]) == [1]
    assert seen == ["long"]

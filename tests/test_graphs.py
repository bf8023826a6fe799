"""Recorded programs, by a stand-in that has no GPU: what lies where, and that nothing is overwritten too early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import tree
from equipoise.engines import Serial, Stacked, graphs
from equipoise.engines.graphs import Graphs, Program
from equipoise.local import Local
from equipoise.method import FedAvg, Method
from equipoise.methods import FedAdam, Scaffold
from equipoise.tree import Tree
from tests.federations import federation
from tests.test_engines import distance, play
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


def recording(engine: Stacked) -> Stacked:
    engine.graphs.recording = True
    return engine


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Recorded", StandIn)


METHODS: list[Method] = [
    FedAvg(),
    Scaffold() + FedAdam(lr=0.05),
    Visits(),
    Lanes(((0, 3, -1), (1, 3, 5), (0, -1, 4))),
]


@pytest.mark.parametrize("crowd", [1, 3, 100])
@pytest.mark.parametrize("cohort", [0, 16])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_recorded_programs_give_the_same(
    method: Method, cohort: int, crowd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stacked, "_few", True)
    monkeypatch.setattr(Stacked, "_crowd", lambda engine, local: crowd)
    fed = federation(sizes=(3, 20, 9, 25, 14, 30) * 3, cohort=cohort, local=Local(lr=0.05, batch=1))
    one, _ = play(fed, method, Serial(fed, precision="float64"), 4)
    engine = recording(Stacked(fed, precision="float64", width=64))
    other, _ = play(fed, method, engine, 4)
    assert engine.graphs.recorded
    assert distance(one.params, other.params) < 1e-12


def test_the_least_recently_used_are_forgotten() -> None:
    made = Graphs(torch.device("cpu"), most=2)
    made.recording = True
    for name in ("a", "b", "a", "c"):
        found = made.run(name, lambda given: given["x"] + 1, {"x": torch.ones(1)}, at_once=True)
        assert found == 2
    assert list(made.recorded) == ["a", "c"]


def test_what_is_recorded_at_the_second_sight_is_computed_at_the_first() -> None:
    made = Graphs(torch.device("cpu"))
    made.recording = True
    for number in range(3):
        assert made.run("a", lambda given: given["x"] * 2, {"x": torch.full((1,), number)}) == 2 * number
        assert len(made.recorded) == min(number, 1)

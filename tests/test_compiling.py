"""Compiled programs are kept, each for tasks of its own kind, and little is checked before they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from equipoise import tree
from equipoise.engines import Engine, Serial, Stacked, compiling
from equipoise.local import Local
from equipoise.method import Chain
from equipoise.round import one_round, start
from equipoise.tree import Tree
from tests.federations import federation


def trained(engine: type[Engine], weight_decay: float = 0.0, **options: Any) -> Tree:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    # One shape, since each takes seconds to compile.
    fed = federation(layers, sizes=(8, 8, 8), cohort=0, local=Local(lr=0.1, batch=8, weight_decay=weight_decay))
    made = engine(fed, precision="float64", **options)
    return one_round(start(fed, Chain(), made), fed, Chain(), made)[0].params


def test_tasks_whose_tensors_are_alike_do_not_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_COMPILED", {})
    for decay in (0.0, 0.5):  # which no tensor tells
        here, there = trained(Stacked, decay, compile=True), trained(Serial, decay)
        tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), here, there)


def test_what_a_task_is_made_of_is_not_checked_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names that torch gives: were they others, everything, or nothing, would be left out without a word."""
    names, kept = [], []
    choose = compiling._that_may_change

    def looked_at(guards: Sequence[Any]) -> list[bool]:
        chosen = choose(guards)
        names.append({guard.name for guard in guards})
        kept.append({guard.name for guard, needed in zip(guards, chosen, strict=True) if needed})
        return chosen

    monkeypatch.setattr(compiling, "_that_may_change", looked_at)
    monkeypatch.setattr(compiling, "_COMPILED", {})
    trained(Stacked, compile=True)
    assert kept
    for some, of_all in zip(kept, names, strict=True):
        assert "" in some
        assert any("params" in name for name in some)
        assert any(name.startswith("function.args[0]") for name in of_all - some)
        assert not any("function" in name or name.startswith("G[") for name in some)

"""Compiled programs are cached, one for every kind of task, and few guards are checked before they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.local import Local
from equipoise.core.round import one_round, start
from equipoise.core.tree import Tree
from equipoise.engines import Serial
from equipoise.fast import compiling
from tests.federations import federation


def trained(engine: type[Engine], weight_decay: float = 0.0, **options: Any) -> Tree:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    # All clients have one shape, since each shape takes seconds to compile.
    fed = federation(layers, sizes=(8, 8, 8), cohort=0, local=Local(lr=0.1, batch=8, weight_decay=weight_decay))
    made = engine(fed, precision="float64", **options)
    return one_round(start(fed, Chain(), made), fed, Chain(), made)[0].params


def test_tasks_that_differ_in_a_setting_do_not_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_COMPILED", {})
    for decay in (0.0, 0.5):  # not visible in the shape or type of any tensor
        here, there = trained(Stacked, decay, compile=True), trained(Serial, decay)
        tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), here, there)


def test_guards_on_the_task_are_dropped_and_guards_on_arguments_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards are chosen by the names that torch gives them. If torch changed the names, all guards or none would be
    dropped silently."""
    names, kept = [], []
    choose = compiling._guards_to_keep

    def observed(guards: Sequence[Any]) -> list[bool]:
        chosen = choose(guards)
        names.append({guard.name for guard in guards})
        kept.append({guard.name for guard, needed in zip(guards, chosen, strict=True) if needed})
        return chosen

    monkeypatch.setattr(compiling, "_guards_to_keep", observed)
    monkeypatch.setattr(compiling, "_COMPILED", {})
    trained(Stacked, compile=True)
    assert kept
    for some, all_names in zip(kept, names, strict=True):
        assert "" in some
        assert any("params" in name for name in some)
        assert any(name.startswith("function.args[0]") for name in all_names - some)
        assert not any("function" in name or name.startswith("G[") for name in some)

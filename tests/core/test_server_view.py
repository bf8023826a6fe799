"""A method's server half sees what a server has, in a simulation too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.method import Method
from equipoise.core.round import one_round, reopen, start
from equipoise.core.server_view import ServerEngine, ServerView
from equipoise.core.tree import Tree
from equipoise.core.turn import Turn
from equipoise.engines import Serial
from equipoise.testing.in_process import site_engine, without_samples
from tests.federations import federation, linear5

PEEKS: dict[str, Callable[[Any, Any], Any]] = {
    "fed.y": lambda fed, engine: fed.y,
    "fed.offsets": lambda fed, engine: fed.offsets,
    "turn.engine.fed": lambda fed, engine: engine.fed,
}


@dataclass(frozen=True)
class Peeks(Method):
    """The server half reads, at one tap, what only a simulation holds."""

    tap: str = ""
    what: str = ""

    name = "peeks"
    reveals = frozenset({"nothing"})

    def _peek(self, tap: str, fed: Any, engine: Any = None) -> None:
        if tap == self.tap:
            PEEKS[self.what](fed, engine)

    def check(self, fed: ServerView, chain: Chain) -> None:
        self._peek("check", fed)

    def init(self, turn: Turn) -> Tree:
        self._peek("init", turn.fed, turn.engine)
        return {}

    def select(self, slot: Tree, fed: ServerView, round: int) -> Tensor:
        self._peek("select", fed)
        return fed.draw(round)

    def plan(self, lanes: Tensor, slot: Tree, fed: ServerView) -> Tensor:
        self._peek("plan", fed)
        return lanes

    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        self._peek("rows", turn.fed, turn.engine)
        return {}

    def close(self, slot: Tree, turn: Turn) -> Tree:
        self._peek("close", turn.fed, turn.engine)
        return slot


TAPS = ("check", "init", "select", "plan", "rows", "close")
CASES = [
    (tap, what) for tap in TAPS for what in PEEKS if what != "turn.engine.fed" or tap in ("init", "rows", "close")
]


def serial(fed: Federation, chain: Chain, folder: Path) -> tuple[Federation, Engine]:
    return fed, Serial(fed)


def stacked(fed: Federation, chain: Chain, folder: Path) -> tuple[Federation, Engine]:
    return fed, Stacked(fed)


def sites(fed: Federation, chain: Chain, folder: Path) -> tuple[Federation, Engine]:
    return without_samples(fed), site_engine(fed, chain, folder, f"{linear5.__module__}:linear5")


@pytest.mark.parametrize("make", [serial, stacked, sites])
@pytest.mark.parametrize(("tap", "what"), CASES)
def test_what_the_clients_hold_is_refused(tap: str, what: str, make: Callable[..., Any], tmp_path: Path) -> None:
    chain = Chain(Peeks(tap, what))
    fed, engine = make(federation(linear5()), chain, tmp_path)
    sentence = (
        f"method: a server tap reads {what}, which no server has: the clients hold their samples; expected"
        " turn.ask(question) for a sum over them"
    )
    with pytest.raises(ConfigError) as refused:
        one_round(start(fed, chain, engine), fed, chain, engine)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("make", [serial, stacked, sites])
def test_who_does_not_look_is_left_alone(make: Callable[..., Any], tmp_path: Path) -> None:
    chain = Chain(Peeks())
    fed, engine = make(federation(linear5()), chain, tmp_path)
    state, sums = one_round(start(fed, chain, engine), fed, chain, engine)
    assert state.round == 1
    assert sums.clients == 4


def test_a_resumed_run_is_checked_with_the_view() -> None:
    fed = federation()
    engine = Stacked(fed)
    state = start(fed, Chain(), engine)
    with pytest.raises(ConfigError, match=r"a server tap reads fed\.y"):
        reopen(state, fed, Chain(Peeks("check", "fed.y")), engine)


def test_the_view_of_a_federation_has_what_a_server_has() -> None:
    fed = federation()
    view = fed.server_view
    assert view is fed.server_view
    assert (view.clients, view.classes, view.shape) == (fed.clients, fed.classes, (5,))
    assert torch.equal(view.draw(3), fed.draw(3))
    assert view.client_name(2) == fed.client_name(2)
    assert view.auxiliary_for("a method") is fed.auxiliary
    known = {field.name for field in fields(ServerView)}
    for name in ("x", "indices", "counts", "class_counts", "minority", "server_view"):
        assert name not in known
        with pytest.raises(ConfigError, match=rf"fed\.{name}, which no server has"):
            getattr(view, name)
    for name in ("test", "validation"):
        with pytest.raises(ConfigError, match=rf"fed\.{name}, which is held apart to judge the model"):
            getattr(view, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        view.nonsense  # noqa: B018
    assert not any(isinstance(value, Federation) for value in vars(view).values())


def test_the_view_of_an_engine_has_what_a_server_needs() -> None:
    fed = federation()
    engine = Stacked(fed, precision="float64")
    view = ServerEngine(engine)
    assert (view.device, view.dtype, view.precision) == (engine.device, engine.dtype, engine.precision)
    for name in ("x", "y", "memory", "store", "offsets", "indices", "sizes", "score"):
        with pytest.raises(ConfigError, match=rf"turn\.engine\.{name}, which no server has"):
            getattr(view, name)
    for name in ("ask", "train"):
        with pytest.raises(ConfigError, match=rf"turn\.engine\.{name}; expected turn\.{name}$"):
            getattr(view, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        view.nonsense  # noqa: B018


def test_views_can_be_copied() -> None:
    view = federation().server_view
    assert copy.copy(view).clients == view.clients
    assert copy.deepcopy(federation()).server_view.classes == view.classes
    assert copy.copy(ServerEngine(Serial(federation()))).dtype == torch.float32
    small = ServerView(**{**vars(view), "network": None})
    assert pickle.loads(pickle.dumps(small)).shape == view.shape


def test_a_federation_within_the_server() -> None:
    view = federation().server_view
    held = view.auxiliary_for("a method")
    inner = view.within(held, torch.tensor([1, 0] * (len(held) // 2)), ("odd", "even", "nobody"))
    assert inner.x is held.x
    assert inner.offsets.tolist() == [0, len(held) // 2, len(held), len(held)]
    assert inner.indices.tolist() == [*range(1, len(held), 2), *range(0, len(held), 2)]
    assert inner.eligible.tolist() == [0, 1]
    assert inner.seed != view.seed
    whole = ServerEngine(Stacked(federation())).inside(lambda: inner)
    assert whole.fed is inner

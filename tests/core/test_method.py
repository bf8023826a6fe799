"""Chains, and every tap that methods may use, on both engines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env
from equipoise.core.engine import Engine
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.questions import MeanLoss, cross_entropy
from equipoise.core.round import one_round, start
from equipoise.core.server_view import ServerView
from equipoise.core.sums import Sums
from equipoise.core.tree import Tree
from equipoise.core.turn import State, Turn
from equipoise.engines import Serial
from equipoise.methods import FedAvgM, FedProx, FedSGD, Scaffold
from tests.federations import SIZES, federation, image_federation, linear, norm_cnn
from tests.reference.loop import batches, client_rows
from tests.toys import Doubles, Even, Factor, Lanes, Looker, Picky, Square, StartLoss, Visits, lanes_by_hand

ENGINES: list[Any] = [
    pytest.param(lambda fed: Stacked(fed, precision="float64", width=2), id="stacked-2"),
    pytest.param(lambda fed: Stacked(fed, precision="float64", width=64), id="stacked-all"),
    pytest.param(lambda fed: Serial(fed, precision="float64"), id="serial"),
]
on_every_engine = pytest.mark.parametrize("make", ENGINES)
Make = Callable[[Federation], Engine]


def play(fed: Federation, method: Method, engine: Engine, rounds: int = 1) -> tuple[State, Sums]:
    chain = Chain(method)
    state = start(fed, chain, engine)
    for _ in range(rounds):
        state, sums = one_round(state, fed, chain, engine)
    return state, sums


def close(got: Tree, want: Tree, tolerance: float = 1e-10) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance)


# -- chains


@dataclass(frozen=True)
class Add(Method):
    """Adds to whatever passes a tap, so that the order of methods shows."""

    name = "add"

    def logits(self, logits: Tensor, env: Env) -> Tensor:
        return logits + 1

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        return losses + 1

    def grads(self, grads: Tree, env: Env) -> Tree:
        return tree.map(lambda g: g + 1, grads)

    def delta(self, delta: Tree, env: Env) -> Tree:
        return tree.map(lambda d: d + 1, delta)

    def weight(self, weight: Tensor, env: Env) -> Tensor:
        return weight + 1

    def batch(self, x: Tensor, y: Tensor, env: Env) -> tuple[Tensor, Tensor]:
        return x + 1, y

    def local(self, settings: Local) -> Local:
        return replace(settings, lr=settings.lr + 1)

    def plan(self, lanes: Tensor, slot: Tree, fed: ServerView) -> Tensor:
        return lanes + 1

    def update(self, update: Tree, sums: Sums, slot: Tree) -> tuple[Tree, Tree]:
        return tree.map(lambda u: u + 1, update), slot


@dataclass(frozen=True)
class Double(Method):
    name = "double"

    def logits(self, logits: Tensor, env: Env) -> Tensor:
        return logits * 2

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        return losses * 2

    def grads(self, grads: Tree, env: Env) -> Tree:
        return tree.scale(grads, 2)

    def delta(self, delta: Tree, env: Env) -> Tree:
        return tree.scale(delta, 2)

    def weight(self, weight: Tensor, env: Env) -> Tensor:
        return weight * 2

    def batch(self, x: Tensor, y: Tensor, env: Env) -> tuple[Tensor, Tensor]:
        return x * 2, y

    def local(self, settings: Local) -> Local:
        return replace(settings, lr=settings.lr * 2)

    def plan(self, lanes: Tensor, slot: Tree, fed: ServerView) -> Tensor:
        return lanes * 2

    def update(self, update: Tree, sums: Sums, slot: Tree) -> tuple[Tree, Tree]:
        return tree.scale(update, 2), slot


@pytest.mark.parametrize(("chain", "expected"), [(Add() + Double(), 8.0), (Double() + Add(), 7.0)], ids=str)
def test_values_pass_the_methods_in_the_order_written(chain: Chain, expected: float) -> None:
    """From 3: add then double is 8, double then add is 7, at every tap."""
    three = torch.tensor([3.0])
    env: Any = Env(*[{} if name in ("msg", "memory", "note") else three for name in Env._fields])
    nothing: Any = Sums(*[{} if name in ("uploads", "rows") else three for name in Sums._fields])
    slots: Tree = {"add": {}, "double": {}}
    fed: Any = None
    got = {
        "logits": chain.logits(three, env),
        "losses": chain.losses(three, three, three, env),
        "grads": chain.grads({"w": three}, env)["w"],
        "delta": chain.delta({"w": three}, env)["w"],
        "weight": chain.weight(three, env),
        "batch": chain.batch(three, three, env)[0],
        "local": torch.tensor([chain.local(Local(lr=3.0)).lr]),
        "plan": chain.plan(three, slots, fed),
        "update": chain.update({"w": three}, nothing, slots)[0]["w"],
    }
    assert {name: value.item() for name, value in got.items()} == dict.fromkeys(got, expected)


def test_sums_of_chains_are_flat() -> None:
    a, b, c = FedProx(mu=0.1), Scaffold(), FedAvgM()
    assert (a + b + c).methods == (a + (b + c)).methods == Chain(Chain(a, b), c).methods == (a, b, c)
    assert [m.name for m in a + b + c] == ["fedprox", "scaffold", "fedavgm"]


def test_fedavg_is_neutral() -> None:
    prox = FedProx(mu=0.1)
    assert FedAvg() + prox == prox + FedAvg() == Chain(prox)
    assert Chain(FedAvg()) == Chain() == Chain(FedAvg(), FedAvg())
    assert str(Chain()) == "fedavg"
    assert str(FedAvg() + prox) == "fedprox(mu=0.1)"


def test_a_chain_is_equal_to_its_repr() -> None:
    both = FedProx(mu=0.1) + Scaffold()
    assert eval(repr(both), {"Chain": Chain, "FedProx": FedProx, "Scaffold": Scaffold}) == both
    assert hash(both) == hash(FedProx(mu=0.1) + Scaffold())


def test_a_method_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="method: fedprox stands 2 times in the chain, expected once"):
        FedProx(mu=0.1) + Scaffold() + FedProx(mu=0.2)


@dataclass(frozen=True)
class Picky2(Picky):
    name = "picky2"


@dataclass(frozen=True)
class Square2(Square):
    name = "square2"


@pytest.mark.parametrize(
    ("one", "other", "sentence"),
    [
        (Picky(), Picky2(), "picky and picky2 each replace the selection of clients; keep one of them"),
        (Square(), Square2(), "square and square2 each replace the loss; keep one of them"),
    ],
)
def test_two_replacements_are_refused(one: Method, other: Method, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        one + FedProx() + other


def test_having_names_the_methods_that_change_a_tap() -> None:
    chain = Scaffold() + FedProx() + Factor()
    assert [m.name for m in chain.having("grads")] == ["scaffold", "fedprox"]
    assert [m.name for m in chain.having("address")] == ["factor"]
    assert chain.having("select") == []


def test_only_settings_that_differ_are_printed() -> None:
    assert str(FedAvgM()) == "fedavgm"
    assert str(FedAvgM(lr=0.5)) == "fedavgm(lr=0.5)"
    assert str(FedAvgM(momentum=0.5, lr=0.5)) == "fedavgm(momentum=0.5, lr=0.5)"


def test_lanes_are_refused_by_methods_that_start_from_the_global_model() -> None:
    fed = federation()
    plan = ((0, 1), (2, 3))
    with pytest.raises(ConfigError, match=r"scaffold is defined from the global model only .* lanes of 2; leave out"):
        play(fed, Scaffold() + Lanes(plan), Serial(fed))
    play(fed, Scaffold() + Lanes(plan[:1]), Serial(fed))


# -- lanes


PLANS: dict[str, list[list[int]]] = {
    "one wave": [[0, 1, 3, 5]],
    "two waves": [[0, 1, 3], [2, 4, 5]],
    "ragged, with holes": [[3, 0, -1, 4], [-1, 1, 5, -1], [2, -1, 1, -1]],
    "a client again in its lane": [[0, 3], [1, 3], [0, 5], [1, 3]],
    "a whole wave of nobody": [[0, 1], [-1, -1], [3, -1]],
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@on_every_engine
def test_lanes_equal_a_loop_by_hand(make: Make, plan: list[list[int]]) -> None:
    torch.manual_seed(0)
    module = linear()
    fed = federation(module, local=Local(lr=0.1, batch=4, epochs=2, momentum=0.5))
    state, sums = play(fed, Lanes(tuple(map(tuple, plan))) + Factor(), make(fed))
    close(state.params, lanes_by_hand(fed, module, plan))
    assert sums.clients == sum(client >= 0 for wave in plan for client in wave)
    lanes = [{*lane} - {-1} for lane in zip(*plan, strict=True)]
    assert sums.weight.item() == sum(SIZES[client] for lane in lanes for client in lane)


@pytest.mark.parametrize("name", ["ragged, with holes", "a client again in its lane"])
@on_every_engine
def test_buffers_go_along_the_lane(make: Make, name: str) -> None:
    torch.manual_seed(0)
    module = norm_cnn()
    fed = image_federation(module)
    state, _ = play(fed, Lanes(tuple(map(tuple, PLANS[name]))) + Factor(), make(fed))
    close({**state.params, **state.buffers}, lanes_by_hand(fed, module, PLANS[name]), 1e-9)


@on_every_engine
def test_memory_goes_along_the_lane(make: Make) -> None:
    fed = federation()
    engine = make(fed)
    _, sums = play(fed, Lanes(((0, 3), (1, 3), (0, -1))) + Visits(), engine)
    saved = engine.memory.save()["visits"]
    assert saved["clients"].tolist() == [0, 1, 3]
    assert saved["rows"]["visits"].tolist() == [2, 1, 2]
    assert sums.uploads["visits"]["visits"].item() == (1 + 1 + 2) + (1 + 2)


@on_every_engine
def test_waves_draw_differently(make: Make) -> None:
    """The same client twice in a lane trains in another order the second time."""
    fed = federation(local=Local(lr=0.1, batch=1))
    rows = [[tuple(b.tolist()) for b in batches(fed, 3, 0, fed.local, wave)] for wave in (0, 1)]
    assert rows[0] != rows[1]
    assert sorted(rows[0]) == sorted(rows[1])


# -- single taps


def mean_cross_entropy(fed: Federation, params: Tree, client: int) -> Tensor:
    rows = client_rows(fed, client)
    network = fed.network
    module = copy.deepcopy(network.module).double()
    module.load_state_dict(params)
    return cross_entropy(module(fed.x[rows].double()), fed.y[rows])


@on_every_engine
def test_begin_sees_all_data_and_finish_sees_its_note(make: Make) -> None:
    fed = federation(cohort=0)
    engine = make(fed)
    state = start(fed, Chain(StartLoss()), engine)
    _, sums = one_round(state, fed, Chain(StartLoss()), engine)
    before = sum(mean_cross_entropy(fed, state.params, client).sum() for client in range(6))
    torch.testing.assert_close(sums.uploads["start_loss"]["before"], before.detach(), rtol=1e-12, atol=1e-12)
    assert sums.uploads["start_loss"]["after"] < before


@dataclass(frozen=True)
class NoData(Method):
    """It does not say that it needs the data, so that none is gathered."""

    name = "no_data"

    def begin(self, env: Env, data: Data | None) -> Tree:
        assert data is None
        return {}


@on_every_engine
def test_data_are_gathered_only_when_needed(make: Make) -> None:
    fed = federation()
    play(fed, NoData(), make(fed))


@on_every_engine
def test_address_reaches_each_client_alone(make: Make) -> None:
    fed = federation(cohort=0)
    engine = make(fed)
    plain, _ = play(fed, FedAvg(), make(fed))
    state, sums = play(fed, Factor() + Looker(), engine)
    lengths = sums.rows["looker"]
    _, alone = play(fed, Looker(), make(fed))
    other = alone.rows["looker"]
    at = lengths["ids"].argsort()
    factor = 0.5 + 0.1 * torch.arange(6, dtype=torch.float64)
    torch.testing.assert_close(
        lengths["values"]["length"][at], factor * other["values"]["length"][other["ids"].argsort()]
    )
    assert not torch.equal(state.params["0.weight"], plain.params["0.weight"])


@on_every_engine
def test_select_replaces_the_draw(make: Make) -> None:
    fed = federation()
    _, sums = play(fed, Picky((1, 4, 5)) + Looker(), make(fed))
    assert sorted(sums.rows["looker"]["ids"].tolist()) == [1, 4, 5]
    assert sums.samples == SIZES[1] + SIZES[4] + SIZES[5]


@on_every_engine
def test_rows_belong_to_their_clients(make: Make) -> None:
    fed = federation(cohort=0)
    _, sums = play(fed, Looker() + Scaffold(), make(fed), rounds=2)
    rows = sums.rows["looker"]
    assert sorted(rows["ids"].tolist()) == list(range(6))
    assert [SIZES[i] for i in rows["ids"].tolist()] == rows["values"]["n"].tolist()
    assert rows["values"]["round"].tolist() == [1] * 6
    assert sums.rows.keys() == {"looker"}
    assert sums.of("scaffold").rows == {}


def test_rows_without_a_declaration_are_refused() -> None:
    @dataclass(frozen=True)
    class Secret(Looker):
        name = "secret"
        reveals = frozenset()

    with pytest.raises(ConfigError, match=r"method: secret looks at single clients, .* must say so in `reveals`"):
        Chain(Secret())


@pytest.mark.parametrize("reveals", [frozenset(), frozenset({"losses"})], ids=["undeclared", "declared"])
def test_asking_for_rows_needs_a_declaration(reveals: frozenset[str]) -> None:
    @dataclass(frozen=True)
    class Asker(Method):
        name = "asker"

        def init(self, turn: Turn) -> Tree:
            return turn.ask(MeanLoss(), rows=True)

    Asker.reveals = reveals
    fed = federation()
    if reveals:
        assert play(fed, Asker(), Serial(fed))[0].slots["asker"]["loss"].shape == (6,)
    else:
        with pytest.raises(ConfigError, match=r"method: asker looks at single clients, .* must say so in `reveals`"):
            play(fed, Asker(), Serial(fed))


def doubled_by_hand(fed: Federation, shift: float) -> Federation:
    """The data that `Doubles` trains on, written out."""
    x, y, sizes = [], [], [0]
    for client in range(fed.clients):
        rows = client_rows(fed, client)
        kept = rows[: max(1, len(rows) - 1)]
        first = fed.x[rows[:1]]
        x += [fed.x[kept], first + shift, first + 2 * shift]
        y += [fed.y[kept], fed.y[rows[:1]].repeat(2)]
        sizes.append(len(kept) + 2)
    features, labels = torch.cat(x), torch.cat(y)
    offsets = torch.tensor(sizes).cumsum(0)
    return replace(fed, x=features, y=labels, offsets=offsets, indices=torch.arange(len(labels)))


@on_every_engine
def test_resampled_copies_reach_the_batch(make: Make) -> None:
    fed = federation()
    state, sums = play(fed, Doubles(shift=0.5), make(fed), rounds=2)
    written = doubled_by_hand(fed, 0.5)
    want, same = play(written, FedAvg(), make(written), rounds=2)
    close(state.params, want.params, 1e-6)  # the shift is added in another precision
    assert sums.samples == same.samples
    assert sums.weight == same.weight


@dataclass(frozen=True)
class Empties(Doubles):
    name = "empties"

    def resample(self, y: Tensor, msg: Tree, key: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(0), torch.arange(0)


def test_a_resampling_that_leaves_nothing_is_refused() -> None:
    fed = federation()
    with pytest.raises(ConfigError, match="method: empties leaves client 0 no sample of its 7 to train on"):
        play(fed, Empties(), Serial(fed))


def test_an_empty_client_is_not_resampled() -> None:
    fed = federation(sizes=(4, 0, 6), cohort=0)
    engine = Serial(fed)
    play(fed, Doubles(), engine)
    assert engine.sizes(torch.arange(3)).tolist() == [5, 0, 7]


@on_every_engine
def test_a_new_start_forgets_the_resampling(make: Make) -> None:
    fed = federation()
    engine = make(fed)
    play(fed, Doubles(), engine)
    state, _ = play(fed, FedAvg(), engine)
    close(state.params, play(fed, FedAvg(), make(fed))[0].params, 0)


@on_every_engine
def test_a_loss_may_be_replaced(make: Make) -> None:
    torch.manual_seed(0)
    module = linear()
    fed = federation(module, sizes=(5, 8), cohort=0, local=Local(lr=0.1, batch="full"))
    state, _ = play(fed, Square(), make(fed))
    total = {k: torch.zeros_like(p, dtype=torch.float64) for k, p in module.named_parameters()}
    for client in range(2):
        copied = copy.deepcopy(module).double()
        rows = client_rows(fed, client)
        target = nn.functional.one_hot(fed.y[rows], 3)
        (copied(fed.x[rows].double()) - target).square().sum(1).mean().backward()
        for name, p in copied.named_parameters():
            assert p.grad is not None
            total[name] += len(rows) * p.grad / 13
    close(state.params, {k: p.detach().double() - 0.1 * total[k] for k, p in module.named_parameters()})


@on_every_engine
def test_weights_may_be_replaced_and_are_known_at_the_client(make: Make) -> None:
    fed = federation()
    uniform = replace(fed, local=replace(fed.local, weighting="uniform"))
    state, sums = play(fed, Even(), make(fed))
    close(state.params, play(uniform, FedAvg(), make(uniform))[0].params)
    assert sums.weight == sums.uploads["even"]["weight"] == 4
    assert Chain(Even()).metrics(state.slots) == {"even.clients": 4.0}


def test_settings_of_local_training_may_be_changed() -> None:
    assert Chain(FedSGD()).local(Local(batch=8, epochs=3)).batch == "full"


@on_every_engine
def test_asking_everybody_makes_no_room_for_another_methods_memory(make: Make) -> None:
    @dataclass(frozen=True)
    class Asks(Visits):
        """Asks all clients at the end of every round."""

        name = "asks"

        def close(self, slot: Tree, turn: Turn) -> Tree:
            turn.ask(MeanLoss())
            return slot

    fed = federation(sizes=SIZES * 3, cohort=2)
    engine = make(fed)
    play(fed, Scaffold() + Asks(), engine)
    assert engine.memory.methods["asks"].seen == 18
    assert engine.memory.methods["scaffold"].seen == 2

"""The round: what the server's half of a method sees, when, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.questions import MeanLoss
from equipoise.core.round import one_round, start
from equipoise.core.server_view import ServerView
from equipoise.core.sums import Sums
from equipoise.core.tree import Tree
from equipoise.core.turn import State, Turn
from equipoise.engines import Serial
from equipoise.methods import FedProx
from tests.federations import SIZES, federation, image_federation, norm_cnn
from tests.toys import Looker, Picky, Visits


@dataclass(frozen=True)
class Diary(Method):
    """Writes down what it sees at every tap of the server."""

    name = "diary"

    def init(self, turn: Turn) -> Tree:
        assert turn.owner == "diary"
        assert turn.sums is None
        assert [m.name for m in turn.chain] == ["diary", "visits"]
        return {"asked": turn.ask(MeanLoss())["loss"], "updates": torch.tensor(0)}

    def broadcast(self, slot: Tree) -> Tree:
        return {"updates": slot["updates"]}

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return {"told": env.msg["updates"]}, env.memory

    def update(self, update: Tree, sums: Sums, slot: Tree) -> tuple[Tree, Tree]:
        assert sums.uploads.keys() == {"told"}  # its own alone
        assert sums.uploads["told"] == sums.clients * slot["updates"]
        return tree.scale(update, 2), {**slot, "updates": slot["updates"] + 1}

    def close(self, slot: Tree, turn: Turn) -> Tree:
        assert turn.sums is not None
        assert turn.plan is not None
        assert turn.plan.tolist() == [turn.fed.draw(turn.state.round).tolist()]
        assert slot["updates"] == turn.state.slots["diary"]["updates"] + 1
        mean = tree.scale(turn.sums.delta, 1 / turn.sums.weight)
        for name, before in turn.state.params.items():
            torch.testing.assert_close(turn.params[name], before + 2 * mean[name])
        return {**slot, "asked": turn.ask(MeanLoss())["loss"]}


@pytest.mark.parametrize("make", [Stacked, Serial])
def test_the_servers_half_sees_its_own_in_the_right_order(make: type[Stacked]) -> None:
    fed, chain = federation(), Chain(Diary(), Visits())
    engine = make(fed, precision="float64")
    state = start(fed, chain, engine)
    assert state.round == 0
    assert state.slots["visits"] == {}
    for round in range(3):
        before = state
        state, sums = one_round(state, fed, chain, engine)
        assert state.round == round + 1
        assert state.slots["diary"]["updates"] == round + 1
        assert sums.uploads.keys() == {"diary", "visits"}
        now = engine.ask(MeanLoss(), state.params, state.buffers)["loss"]
        assert state.slots["diary"]["asked"] == now  # close asks about the new model
        assert before.slots["diary"]["asked"] != now


def test_the_model_moves_by_the_weighted_mean() -> None:
    fed = federation(local=Local(lr=0.1, batch=4))
    both = run(fed, Picky((1, 3)))
    alone = [run(fed, Picky((client,))) for client in (1, 3)]
    for name, before in fed.network.params.items():
        moves = [SIZES[client] * (end.params[name] - before) for client, end in zip((1, 3), alone, strict=True)]
        expected = before + sum(moves[1:], moves[0]) / (SIZES[1] + SIZES[3])
        torch.testing.assert_close(both.params[name], expected, rtol=1e-12, atol=1e-12)


def run(fed: Federation, method: Method) -> State:
    chain, engine = Chain(method), Stacked(fed, precision="float64")
    return one_round(start(fed, chain, engine), fed, chain, engine)[0]


def test_buffers_move_by_plain_weight_whatever_weighs_the_deltas() -> None:
    @dataclass(frozen=True)
    class Upside(Method):
        """Negative weights: right for deltas, wrong for a variance."""

        name = "upside"

        def weight(self, weight: Tensor, env: Env) -> Tensor:
            return -weight

    torch.manual_seed(0)
    fed = image_federation(norm_cnn())
    plain, upside = run(fed, FedProx(mu=0.0)), run(fed, Upside())
    for name, value in plain.buffers.items():
        torch.testing.assert_close(upside.buffers[name], value)
    assert plain.buffers["1.num_batches_tracked"].item() == 2 * 5  # of the client that took most steps


def test_methods_are_checked_before_anything_is_asked() -> None:
    @dataclass(frozen=True)
    class Fussy(Method):
        name = "fussy"

        def check(self, fed: ServerView, chain: Chain) -> None:
            raise ConfigError(f"method: fussy does not like {[m.name for m in chain]}")

        def init(self, turn: Turn) -> Tree:
            raise AssertionError("too late")

    fed = federation()
    with pytest.raises(ConfigError, match=r"does not like \['fussy', 'fedprox'\]"):
        start(fed, Fussy() + FedProx(), Stacked(fed))


def test_training_beside_the_run_moves_nothing() -> None:
    @dataclass(frozen=True)
    class Rehearsal(Method):
        name = "rehearsal"

        def init(self, turn: Turn) -> Tree:
            rows = turn.train(Looker(), Local(lr=0.5, batch="full")).rows
            return {"lengths": rows["values"]["length"][rows["ids"].argsort()]}

    fed = federation()
    engine, chain = Stacked(fed), Chain(Rehearsal())
    state = start(fed, chain, engine)
    assert state.slots["rehearsal"]["lengths"].shape == (6,)
    assert (state.slots["rehearsal"]["lengths"] > 0).all()
    assert all(torch.equal(state.params[name], p) for name, p in fed.network.params.items())
    assert state.round == 0


def test_a_turn_belongs_to_one_method() -> None:
    fed = federation()
    engine, chain = Stacked(fed), Looker() + Visits()
    state = start(fed, chain, engine)
    _, sums = one_round(state, fed, chain, engine)
    turn = Turn.begin(fed, engine, state)._replace(sums=sums)
    mine = turn.of("looker")
    assert mine.owner == "looker"
    assert mine.sums is not None
    assert mine.sums.uploads.keys() == {"n"}
    assert mine.sums.rows.keys() == {"ids", "values"}
    assert turn.of("nobody").sums == sums._replace(uploads={}, rows={})

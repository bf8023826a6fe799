"""The monitor of Ratio-Loss: how classes move the last layer, and the class counts that follow from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from equipoise import Stacked
from equipoise.core import random
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.network import Network
from equipoise.core.round import one_round, start
from equipoise.core.turn import Turn
from equipoise.engines import Serial
from equipoise.methods import RatioLoss
from equipoise.methods.shared import monitor
from tests.federations import federation, image_federation


@torch.no_grad()
def test_moves_are_those_of_copies_trained_on_single_classes() -> None:
    fed = federation()
    assert fed.auxiliary is not None
    for engine in (Stacked(fed, precision="float64"), Serial(fed, precision="float64")):
        state = start(fed, Chain(), engine)
        turn = Turn.begin(fed, engine, state)
        moves = monitor.moves(turn, Local(lr=0.5, batch="full"))
        for p in range(3):
            module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
            module.load_state_dict(state.params)
            mine = fed.auxiliary.y == p
            with torch.enable_grad():
                loss = nn.functional.cross_entropy(module(fed.auxiliary.x[mine].double()), fed.auxiliary.y[mine])
                (gradient,) = torch.autograd.grad(loss, module[2].weight)
            torch.testing.assert_close(moves[p], -0.5 * gradient)


@torch.no_grad()
def test_the_servers_copies_share_no_random_draws_with_the_clients() -> None:
    fed = federation()
    engine = Stacked(fed)
    state = start(fed, Chain(), engine)
    monitor.moves(Turn.begin(fed, engine, state), Local(batch=2))
    inside = engine.server_side
    assert inside is not None
    assert inside.fed.seed != fed.seed
    key = random.bits(inside.fed.seed, random.TRAIN, 0, 0, 1)
    assert int(key) != int(random.bits(fed.seed, random.TRAIN, 0, 0, 1))


def test_a_coordinate_belongs_to_the_class_that_clearly_moves_it_most() -> None:
    # [0, 0] is clearly moved most by class 0. At [0, 1] class 1 has a large negative rival. At [1, 0] class 1 is too
    # close to class 0. No class moves [1, 1].
    delta = torch.tensor([[[1.0, -0.5], [1.0, 0.0]], [[0.7, 1.0], [0.9, 0.0]], [[-0.8, -0.9], [0.0, 0.0]]])
    chosen = monitor.select(delta, threshold=1.25)
    assert chosen[:, 0, 0].tolist() == [True, False, False]  # 1.25 * 0.8 = 1
    assert chosen[:, 1, 0].tolist() == [False, False, False]
    assert chosen[:, 0, 1].tolist() == [False, False, False]
    assert monitor.select(delta, threshold=1.0)[:, 0, 1].tolist() == [False, True, False]


def test_mean_of_others_leaves_out_the_class_itself() -> None:
    delta = torch.tensor([1.0, 2.0, 6.0]).view(3, 1, 1)
    assert monitor.mean_of_others(delta).flatten().tolist() == [4.0, 3.5, 1.5]


def counts_after(fed: Federation, rounds: int) -> torch.Tensor:
    engine, chain = Stacked(fed, precision="float64"), Chain(RatioLoss(beta=0.0))
    state = start(fed, chain, engine)
    for _ in range(rounds):
        state, _ = one_round(state, fed, chain, engine)
    counts: torch.Tensor = state.slots["ratio_loss"]["counts"]
    return counts


def skewed(local: Local) -> Federation:
    """Twelve clients with two samples of each of the last two classes and seven of the others; 16 per class at the
    server."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 6))
    fed = federation(model, sizes=(32,) * 12, cohort=0, shape=(20,), classes=6, auxiliary=16, local=local)
    pools = [(fed.y == c).nonzero()[:, 0] for c in range(6)]
    rows = [
        pool[torch.arange(i * count, (i + 1) * count) % len(pool)]
        for i in range(12)
        for pool, count in zip(pools, (7, 7, 7, 7, 2, 2), strict=True)
    ]
    return replace(fed, indices=torch.cat(rows))


def test_the_counts_resemble_the_true_ones() -> None:
    """What the estimate assumes: clients of equal size, and batches as large as a class of the auxiliary set."""
    fed = skewed(Local(lr=0.05, batch=16, epochs=2))
    truth = fed.class_counts.double()
    assert truth.tolist() == [84, 84, 84, 84, 24, 24]
    found = counts_after(fed, 3)
    assert torch.cosine_similarity(found, truth, dim=0) > 0.99
    assert found[4:].max() < found[:4].min()


def test_samples_in_the_steps_of_a_copy() -> None:
    fed = federation(auxiliary=10)
    assert monitor.seen_by_copy(fed.server_view, Local(batch=10, epochs=3)) == 10
    assert monitor.seen_by_copy(fed.server_view, Local(batch=4, epochs=3)) == 12  # three steps of 4
    assert monitor.seen_by_copy(fed.server_view, Local(batch="full", epochs=2)) == 10


def test_the_last_layer_has_a_row_per_class() -> None:
    assert monitor.last_layer(federation().server_view) == "2.weight"
    convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 4), nn.Flatten())
    assert monitor.last_layer(image_federation(convolution).server_view) == "2.weight"
    odd = replace(federation(), network=Network(nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 4))))
    with pytest.raises(ConfigError, match="one row of weights for each of the 3 classes"):
        monitor.last_layer(odd.server_view)

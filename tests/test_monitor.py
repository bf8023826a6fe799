"""The monitor: what classes do to the last layer, and the class counts that follow from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from equipoise import monitor, random
from equipoise.engines import Serial, Stacked
from equipoise.errors import ConfigError
from equipoise.federation import Federation
from equipoise.local import Local
from equipoise.method import Chain
from equipoise.methods import RatioLoss
from equipoise.network import Network
from equipoise.round import one_round, start
from equipoise.server import Turn
from tests.federations import federation, image_federation


@torch.no_grad()
def test_moves_are_those_of_copies_trained_on_single_classes() -> None:
    fed = federation()
    assert fed.auxiliary is not None
    for engine in (Stacked(fed, precision="float64"), Serial(fed, precision="float64")):
        state = start(fed, Chain(), engine)
        turn = Turn(fed, engine, state, state.params, state.buffers)
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
def test_the_servers_copies_share_no_draw_with_the_clients() -> None:
    fed = federation()
    engine = Stacked(fed)
    state = start(fed, Chain(), engine)
    monitor.moves(Turn(fed, engine, state, state.params, state.buffers), Local(batch=2))
    inside = monitor._inside[engine]
    assert inside.fed.seed != fed.seed
    key = random.bits(inside.fed.seed, random.TRAIN, 0, 0, 1)
    assert int(key) != int(random.bits(fed.seed, random.TRAIN, 0, 0, 1))


def test_a_coordinate_belongs_to_the_class_that_clearly_moves_it_most() -> None:
    #                      clear        too near     a large negative rival   nobody
    delta = torch.tensor([[[1.0, -0.5], [1.0, 0.0]], [[0.7, 1.0], [0.9, 0.0]], [[-0.8, -0.9], [0.0, 0.0]]])
    chosen = monitor.select(delta, threshold=1.25)
    assert chosen[:, 0, 0].tolist() == [True, False, False]  # 1.25 * 0.8 = 1
    assert chosen[:, 1, 0].tolist() == [False, False, False]
    assert chosen[:, 0, 1].tolist() == [False, False, False]
    assert monitor.select(delta, threshold=1.0)[:, 0, 1].tolist() == [False, True, False]


def test_of_others_leaves_out_the_class_itself() -> None:
    delta = torch.tensor([1.0, 2.0, 6.0]).view(3, 1, 1)
    assert monitor.of_others(delta).flatten().tolist() == [4.0, 3.5, 1.5]


def counts_after(fed: Federation, rounds: int) -> torch.Tensor:
    engine, chain = Stacked(fed, precision="float64"), Chain(RatioLoss(beta=0.0))
    state = start(fed, chain, engine)
    for _ in range(rounds):
        state, _ = one_round(state, fed, chain, engine)
    counts: torch.Tensor = state.slots["ratio_loss"]["counts"]
    return counts


def skewed(local: Local) -> Federation:
    """Twelve clients of 32 samples, seven of each class but two of the last two; the server holds 16 per class."""
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
    """Clients of equal size, batches as large as a class of the auxiliary set: as the estimate presumes."""
    fed = skewed(Local(lr=0.05, batch=16, epochs=2))
    truth = fed.class_counts.double()
    assert truth.tolist() == [84, 84, 84, 84, 24, 24]
    found = counts_after(fed, 3)
    assert torch.cosine_similarity(found, truth, dim=0) > 0.99
    assert found[4:].max() < found[:4].min()


def test_a_copys_steps_are_worth_so_many_samples() -> None:
    fed = federation(auxiliary=10)
    assert monitor.seen_by_copy(fed, Local(batch=10, epochs=3)) == 10
    assert monitor.seen_by_copy(fed, Local(batch=4, epochs=3)) == 12  # three steps, as a client with 12 samples takes
    assert monitor.seen_by_copy(fed, Local(batch="full", epochs=2)) == 10


def test_the_last_layer_has_a_row_per_class() -> None:
    assert monitor.last_layer(federation()) == "2.weight"
    convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 4), nn.Flatten())
    assert monitor.last_layer(image_federation(convolution)) == "2.weight"
    odd = replace(federation(), network=Network(nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 4))))
    with pytest.raises(ConfigError, match="one row of weights for each of the 3 classes"):
        monitor.last_layer(odd)

"""FedRE's estimate of class shares: how clients contribute to it, and when it is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.round import start
from equipoise.core.turn import Turn
from equipoise.engines import Serial
from equipoise.methods import FedRE, Scaffold
from equipoise.methods.shared.estimation import SquareLoss, probe, shares
from equipoise.papers.estimate import estimate
from tests.federations import federation, image_federation, norm_cnn

QUICK = Local(lr=0.05, batch=4, epochs=3)


def a_turn(fed: Federation, engine: Stacked | Serial) -> Turn:
    state = start(fed, Chain(), engine)
    return Turn.begin(fed, engine, state)


@torch.no_grad()
def test_each_client_answers_with_its_own_model() -> None:
    fed = federation()
    engine = Stacked(fed, width=2, precision="float64")
    turn = a_turn(fed, engine)
    answers = probe(turn, QUICK)
    assert answers.samples.tolist() == [7, 12, 1, 20, 5, 9]
    for client in range(fed.clients):
        sums = engine.train(turn.state._replace(round=-1, slots={"square_loss": {}}), torch.tensor([[client]]),
                            Chain(SquareLoss()), QUICK, turn)  # fmt: skip
        alone = tree.add(turn.params, tree.scale(sums.delta, 1 / sums.weight))
        torch.testing.assert_close(answers.outputs[client], engine.outputs(alone, {}, fed.auxiliary.x).mean(0))
    pooled = sum(n / 54 * row for n, row in zip([7, 12, 1, 20, 5, 9], answers.outputs, strict=True))
    torch.testing.assert_close(answers.pooled(), pooled)


@torch.no_grad()
def test_a_clients_own_running_statistics_are_used() -> None:
    torch.manual_seed(0)
    fed = image_federation(norm_cnn())
    engine = Stacked(fed, precision="float64")
    turn = a_turn(fed, engine)
    answers = probe(turn, QUICK)
    start_state = turn.state._replace(round=-1, slots={"square_loss": {}})
    sums = engine.train(start_state, torch.tensor([[3]]), Chain(SquareLoss()), QUICK, turn)
    own = sums.mean_buffers(turn.buffers)
    alone = tree.add(turn.params, tree.scale(sums.delta, 1 / sums.weight))
    mean = engine.outputs(alone, own, fed.auxiliary.x).mean(0)
    torch.testing.assert_close(answers.outputs[3], mean)
    assert not torch.allclose(mean, engine.outputs(alone, turn.buffers, fed.auxiliary.x).mean(0))


def test_the_prelude_leaves_no_trace() -> None:
    fed = federation()
    engine = Stacked(fed)
    state = start(fed, Scaffold() + FedRE(), engine)
    assert engine.memory.save() == {}  # no client has a control variate yet
    torch.testing.assert_close(state.params, fed.network.params, rtol=0, atol=0)


def test_shares_are_above_the_floor_and_sum_to_one() -> None:
    made = shares(torch.tensor([[-0.2, 0.5, 0.7], [0.0, 0.0, 0.0]]), floor=0.3)
    torch.testing.assert_close(made, torch.tensor([[0.1, 0.5, 0.7], [1.0, 1.0, 1.0]]) / torch.tensor([[1.3], [3.0]]))


@pytest.mark.parametrize("engine", [Stacked, Serial])
def test_a_converged_bias_tells_the_shares_of_every_client(engine: type) -> None:
    """All inputs are equal, so that the best output of a network is the class shares."""
    fed = federation(sizes=(30, 20, 40), cohort=0)
    assert fed.auxiliary is not None
    held = replace(fed.auxiliary, x=torch.ones_like(fed.auxiliary.x))
    blind = replace(fed, x=torch.ones_like(fed.x), auxiliary=held)
    found = estimate(blind, Local(lr=0.02, batch="full", epochs=300), engine(blind, precision="float64"))
    truth = [torch.bincount(fed.y[part], minlength=3) / len(part) for part in fed.indices.split([30, 20, 40])]
    torch.testing.assert_close(found.clients_truth, torch.stack(truth).double(), rtol=0, atol=1e-7)
    torch.testing.assert_close(found.truth, fed.class_counts.double() / 90)
    torch.testing.assert_close(found.clients, found.clients_truth, rtol=0.02, atol=0.005)
    assert float(found.error.max()) < 0.02
    torch.testing.assert_close(found.error, (found.shares - found.truth).abs() / found.truth)


def test_without_samples_at_the_server_there_is_no_estimate() -> None:
    with pytest.raises(ConfigError, match=r"class shares needs samples of every class .* data.auxiliary = 32"):
        estimate(federation(auxiliary=0))

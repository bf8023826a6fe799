from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.round import start
from equipoise.methods import AFL, QFFL, Climb, FedNova
from equipoise.runs.evaluation import across_clients
from tests.federations import federation
from tests.methods.test_afl import conflicted, trained


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_at_q_zero_it_is_fedavg(weighting: str) -> None:
    fed = federation()
    fed = replace(fed, local=replace(fed.local, weighting=weighting))
    one, _ = trained(fed, QFFL(q=0.0), 3)
    other, _ = trained(fed, FedAvg(), 3)
    for name, value in one.params.items():
        torch.testing.assert_close(value, other.params[name], rtol=1e-12, atol=1e-12)


def test_a_larger_q_evens_out_the_losses() -> None:
    gaps = []
    for q in (0.0, 1.0, 4.0):
        state, engine = trained(conflicted(), QFFL(q=q), 60)
        losses = across_clients(engine, state.params, state.buffers, Chain())["client_loss"]
        gaps.append(losses["max"] - losses["min"])
    assert gaps[2] < gaps[1] < gaps[0]


def test_a_client_with_a_loss_of_zero_does_no_harm() -> None:
    fed = federation(sizes=(4, 4), cohort=0, local=Local(lr=0.1, batch="full"))
    state, _ = trained(fed, QFFL(q=0.5), 1)
    fed.network.params["2.bias"][:] = torch.tensor([0.0, 0.0, 1e9])
    fed.y[:] = 2  # now every sample is predicted with certainty
    state, _ = trained(fed, QFFL(q=0.5), 1)
    assert all(bool(leaf.isfinite().all()) for leaf in state.params.values())


def test_adam_needs_its_own_lipschitz_constant() -> None:
    fed = federation(local=Local(optimiser="adam", lr=0.01))
    with pytest.raises(ConfigError, match="qffl computes gradients from the clients' deltas"):
        start(fed, Chain(QFFL()), Stacked(fed))
    start(fed, Chain(QFFL(lipschitz=10.0)), Stacked(fed))


@pytest.mark.parametrize("other", [AFL(), Climb(), FedNova()], ids=str)
def test_methods_that_do_not_combine_are_refused(other: Method) -> None:
    fed = federation()
    with pytest.raises(ConfigError, match=f"qffl and {other.name}|{other.name} and qffl"):
        start(fed, Chain(QFFL() + other), Stacked(fed))


@pytest.mark.parametrize("settings", [{"q": -0.5}, {"lipschitz": 0.0}], ids=str)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected a number"):
        QFFL(**settings)

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.round import one_round, start
from equipoise.core.turn import State
from equipoise.methods import AFL, QFFL, Astraea, Climb
from equipoise.methods.afl import simplex
from equipoise.runs.evaluation import across_clients
from tests.federations import federation
from tests.reference.fair import onto_simplex


def trained(fed: Federation, method: Method, rounds: int) -> tuple[State, Stacked]:
    chain, engine = Chain(method), Stacked(fed, precision="float64")
    state = start(fed, chain, engine)
    for _ in range(rounds):
        state, _ = one_round(state, fed, chain, engine)
    return state, engine


@pytest.mark.parametrize("seed", range(4))
def test_projection_onto_the_simplex(seed: int) -> None:
    v = 3 * torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(simplex(v), torch.tensor(onto_simplex(v.tolist()), dtype=torch.float64))
    assert float(simplex(v).sum()) == pytest.approx(1)
    assert bool((simplex(v) >= 0).all())


def test_a_point_of_the_simplex_stays() -> None:
    v = torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=torch.float64)
    torch.testing.assert_close(simplex(v), v)


def conflicted() -> Federation:
    """Five clients agree; the last one has its two labels swapped."""
    fed = federation(sizes=(20, 20, 20, 20, 20, 20), classes=2, cohort=0, local=Local(lr=0.3, batch=10))
    last = fed.indices[100:]
    fed.y[last] = 1 - fed.y[last]
    return fed


def test_the_worst_client_has_a_lower_loss_than_with_fedavg() -> None:
    worst = {}
    for method in (FedAvg(), AFL(eta=0.05)):
        state, engine = trained(conflicted(), method, 30)
        worst[method.name] = across_clients(engine, state.params, state.buffers, Chain())["client_loss"]["max"]
        if method.name == "afl":
            assert int(state.slots["afl"]["lambda"].argmax()) == 5
            assert method.metrics(state.slots["afl"])["largest"] > 0.3
    assert worst["afl"] < 0.8 * worst["fedavg"]


def test_with_eta_zero_all_clients_have_the_same_weight() -> None:
    fed = federation()
    even = replace(fed, local=replace(fed.local, weighting="uniform"))
    one, _ = trained(fed, AFL(eta=0.0), 2)
    other, _ = trained(even, FedAvg(), 2)
    for name, value in one.params.items():
        torch.testing.assert_close(value, other.params[name], rtol=1e-12, atol=1e-12)


def test_clients_without_data_have_no_weight() -> None:
    state, _ = trained(federation(sizes=(7, 0, 5), cohort=0), AFL(eta=0.5), 2)
    assert float(state.slots["afl"]["lambda"][1]) == 0
    assert float(state.slots["afl"]["lambda"].sum()) == pytest.approx(1)


@pytest.mark.parametrize("other", [QFFL(), Climb(), Astraea(gamma=2, tau_d=None)], ids=str)
def test_methods_that_do_not_combine_are_refused(other: Method) -> None:
    fed = federation()
    with pytest.raises(ConfigError, match="afl"):
        start(fed, Chain(AFL() + other), Stacked(fed))


def test_a_negative_eta_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"afl\(eta=-1\): expected a number, 0 or above"):
        AFL(eta=-1)

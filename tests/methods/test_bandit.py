from __future__ import annotations

import pytest
import torch

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.round import one_round, start
from equipoise.engines import Serial
from equipoise.methods import CUCB, Active, Climb, FedNova
from tests.federations import federation, linear
from tests.methods.test_afl import trained
from tests.reference.selection import cucb


@pytest.mark.parametrize("engine", [Stacked, Serial])
@pytest.mark.parametrize("alpha", [0.0, 0.8])
def test_cohorts_are_those_of_the_reference(alpha: float, engine: type) -> None:
    torch.manual_seed(0)
    module = linear()
    fed = federation(module, sizes=(7, 12, 3, 20, 5, 9, 6), cohort=3)
    chain, runner = Chain(CUCB(alpha=alpha)), engine(fed, precision="float64")
    state, cohorts = start(fed, chain, runner), []
    for _ in range(8):
        cohorts.append(chain.select(state.slots, fed.server_view, state.round).tolist())
        state, _ = one_round(state, fed, chain, runner)
    want, selected = cucb(fed, module, 8, fed.local, alpha)
    assert cohorts == selected
    assert {client for cohort in cohorts[:3] for client in cohort} == set(range(7))
    for name, value in state.params.items():
        torch.testing.assert_close(value, want[name], rtol=1e-8, atol=1e-8)


def test_the_estimated_mix_finds_the_class_of_a_client() -> None:
    fed = federation(sizes=(12, 12, 12), cohort=0, local=Local(lr=0.2, batch=4, epochs=5))
    fed.y[fed.indices] = torch.arange(3).repeat_interleave(12)
    state, _ = trained(fed, CUCB(), 2)
    mix = state.slots["cucb"]["mix"]
    assert mix.argmax(1).tolist() == [0, 1, 2]
    torch.testing.assert_close(mix.sum(1), torch.ones(3, dtype=torch.float64))


def test_it_needs_samples_at_the_server() -> None:
    fed = federation(auxiliary=0)
    with pytest.raises(ConfigError, match="cucb needs samples of every class at the server"):
        start(fed, Chain(CUCB()), Stacked(fed))


@pytest.mark.parametrize("other", [Climb(), FedNova()], ids=str)
def test_methods_that_change_deltas_are_refused(other: Method) -> None:
    fed = federation()
    with pytest.raises(ConfigError, match=f"cucb computes a client's model from its delta, and {other.name}"):
        start(fed, Chain(CUCB() + other), Stacked(fed))


def test_two_methods_that_select_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match="cucb and active each replace the selection of clients"):
        Chain(CUCB() + Active())


def test_a_negative_alpha_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cucb\(alpha=-1\)"):
        CUCB(alpha=-1)

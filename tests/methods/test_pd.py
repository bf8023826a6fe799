from __future__ import annotations

import pytest
import torch

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.method import Method
from equipoise.core.round import one_round, start
from equipoise.methods import Climb, FedNova, FedPD, Scaffold
from tests.federations import federation
from tests.methods.test_afl import trained
from tests.methods.test_dyn import drifting


def test_multipliers_end_as_the_clients_gradients() -> None:
    """At the optimum lambda_i = -grad f_i, and their sum is zero."""
    _, engine = trained(drifting(), FedPD(eta=2.0), 60)
    duals = engine.memory.save()["fedpd"]["rows"]["dual"]
    total = tree.map(lambda leaf: leaf.sum(0), duals)
    assert float(tree.norm(total)) < 1e-3
    assert float(tree.norm(duals)) > 0.1


def test_climb_must_come_after_it() -> None:
    fed = federation()
    start(fed, Chain(FedPD() + Climb()), Stacked(fed))
    with pytest.raises(ConfigError, match=r"it must come first; write fedpd \+ climb"):
        start(fed, Chain(Climb() + FedPD()), Stacked(fed))


@pytest.mark.parametrize("other", [Scaffold(), FedNova()], ids=str)
def test_methods_that_do_not_combine_are_refused(other: Method) -> None:
    fed = federation()
    with pytest.raises(ConfigError, match=f"fedpd and {other.name}"):
        start(fed, Chain(FedPD() + other), Stacked(fed))


def test_clients_that_do_not_take_part_keep_their_multipliers() -> None:
    fed = federation(cohort=2, seed=1)
    state, engine = trained(fed, FedPD(eta=2.0), 1)
    first = engine.memory.save()["fedpd"]
    chain = Chain(FedPD(eta=2.0))
    state, _ = one_round(state, fed, chain, engine)
    absent = [c for c in fed.draw(0).tolist() if c not in fed.draw(1).tolist()]
    assert absent
    now = engine.memory.save()["fedpd"]
    for client in absent:
        before, after = ((s["clients"] == client).nonzero()[0, 0] for s in (first, now))
        assert torch.equal(first["rows"]["dual"]["0.bias"][before], now["rows"]["dual"]["0.bias"][after])


def test_eta_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fedpd\(eta=0\): expected a number above 0"):
        FedPD(eta=0)

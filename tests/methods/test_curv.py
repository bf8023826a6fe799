from __future__ import annotations

import pytest
import torch

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.round import start
from equipoise.methods import Astraea, FedCurv
from tests.federations import federation
from tests.methods.test_afl import trained


def test_the_server_has_the_sum_of_the_clients_memories() -> None:
    state, engine = trained(federation(), FedCurv(lam=0.2), 4)
    kept = tree.map(lambda leaf: leaf.sum(0), engine.memory.save()["fedcurv"]["rows"])
    have = tree.flatten(state.slots["fedcurv"])
    for name, value in tree.flatten(kept).items():
        torch.testing.assert_close(have[name], value)
    assert all(bool((leaf >= 0).all()) for leaf in tree.leaves(kept["fisher"]))


def test_with_a_larger_lambda_clients_end_closer_to_each_other() -> None:
    fed = federation(sizes=(20, 20, 20), cohort=0)
    fed.y[fed.indices] = torch.arange(3).repeat_interleave(20)
    spread = []
    for lam in (0.0, 0.3, 1.0):
        method = FedCurv(lam=lam)
        _, engine = trained(fed, method, 5)
        kept = engine.memory.save()["fedcurv"]["rows"]
        ends = tree.map(lambda v, i: torch.where(i > 1e-12, v / i, 0), kept["pull"], kept["fisher"])
        spread.append(sum(float(leaf.std(0).sum()) for leaf in tree.leaves(ends)))
    assert spread[2] < spread[1] < spread[0]


def test_chains_of_clients_are_refused() -> None:
    fed = federation()
    with pytest.raises(ConfigError, match="fedcurv is only defined"):
        start(fed, Chain(FedCurv() + Astraea(gamma=2, tau_d=None)), Stacked(fed))


def test_a_negative_lambda_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fedcurv\(lam=-1\)"):
        FedCurv(lam=-1)

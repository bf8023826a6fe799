from __future__ import annotations

import pytest
import torch

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.network import Context
from equipoise.core.questions import cross_entropy
from equipoise.core.round import start
from equipoise.core.tree import Tree
from equipoise.methods import AFL, Climb, FedDyn, FedNova, FedPD, Scaffold
from tests.federations import federation
from tests.methods.test_afl import trained


def drifting() -> Federation:
    """A convex problem with strong drift: clients have one class each and take many steps per round."""
    module = torch.nn.Linear(5, 3).double()
    local = Local(lr=0.2, batch="full", epochs=20, weight_decay=0.05, weighting="uniform")
    fed = federation(module, sizes=(8, 8, 8), cohort=0, local=local)
    fed.y[fed.indices] = torch.arange(3).repeat_interleave(8)
    return fed


def slope(fed: Federation, params: Tree) -> float:
    """The norm of the gradient of the mean objective of all clients."""

    def objective(params: Tree) -> torch.Tensor:
        context = Context(torch.ones(24, dtype=torch.bool), torch.tensor(0), True)
        outputs, _ = fed.network(params, {}, fed.x[fed.indices].double(), context)
        return cross_entropy(outputs, fed.y[fed.indices]).mean() + 0.025 * tree.dot(params, params)

    return float(tree.norm(torch.func.grad(objective)(params)))


@pytest.mark.parametrize("method", [FedDyn(alpha=0.3), FedPD(eta=2.0)], ids=str)
def test_it_ends_at_the_optimum_and_fedavg_does_not(method: Method) -> None:
    fed = drifting()
    ended, _ = trained(fed, method, 60)
    average, _ = trained(fed, FedAvg(), 60)
    assert slope(fed, ended.params) < 1e-3
    assert slope(fed, average.params) > 1e-2


def test_the_server_keeps_the_mean_of_the_clients_gradients() -> None:
    fed = federation()
    state, engine = trained(fed, FedDyn(alpha=0.3), 4)
    kept = engine.memory.save()["feddyn"]["rows"]["gradient"]
    for name, h in state.slots["feddyn"]["h"].items():
        torch.testing.assert_close(h, kept[name].sum(0) / fed.clients)


@pytest.mark.parametrize("other", [Scaffold(), FedPD(), FedNova(), AFL(), Climb()], ids=str)
def test_methods_that_do_not_combine_are_refused(other: Method) -> None:
    fed = federation()
    with pytest.raises(ConfigError, match=f"feddyn.*{other.name}.*keep one"):
        start(fed, Chain(FedDyn() + other), Stacked(fed))


def test_alpha_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"feddyn\(alpha=0\): expected a number above 0"):
        FedDyn(alpha=0)

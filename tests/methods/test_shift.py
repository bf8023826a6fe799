"""FedShift: the shift, the counts it is computed from, and that all clients share one optimum (Theorem 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.network import Network
from equipoise.core.round import one_round, start
from equipoise.core.server_view import ServerEngine
from equipoise.core.tree import Tree
from equipoise.core.turn import State, Turn
from equipoise.methods import Astraea, ClassWeights, FedRE, FedShift, Focal
from tests.federations import federation


def run(fed: Federation, method: Method, rounds: int) -> tuple[State, Stacked]:
    engine, chain = Stacked(fed, precision="float64"), Chain(method)
    state = start(fed, chain, engine)
    for _ in range(rounds):
        state, _ = one_round(state, fed, chain, engine)
    return state, engine


def counted(*labels: list[int], classes: int = 3) -> Federation:
    """A federation of clients with these labels."""
    fed = federation(sizes=tuple(len(own) for own in labels), classes=classes, cohort=0)
    y = fed.y.clone()
    y[fed.indices] = torch.tensor([label for own in labels for label in own])
    return replace(fed, y=y)


def shift(method: FedShift, counts: list[float], shares: list[float]) -> Tensor:
    class Engine:
        def ask(self, *args: Any, **options: Any) -> Tree:
            return {"mass": 7 * torch.tensor(shares, dtype=torch.float64)}

    class Env:
        memory = {"counts": torch.tensor(counts, dtype=torch.float64)}  # noqa: RUF012
        msg = method.broadcast(method.init(Turn(federation().server_view, ServerEngine(Engine()), *[{}] * 3)))  # type: ignore[arg-type]

    found: Tensor = method.begin(Env, None)["shift"]  # type: ignore[arg-type]
    return found


# -- the shift -----------------------------------------------------------------------------------------------------
PRIOR = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
OWN = torch.tensor([7 / 10, 1 / 10, 2 / 10], dtype=torch.float64)  # smoothed shares of 6, 0 and 1 samples


@pytest.mark.parametrize(
    ("method", "want"),
    [
        (FedShift(), (OWN / PRIOR).log()),
        (FedShift(temperature=0.5), 0.5 * (OWN / PRIOR).log()),
        (FedShift(prior="uniform"), OWN.log()),
        (FedShift(prior=(0.2, 0.2, 0.6)), (OWN / torch.tensor([0.2, 0.2, 0.6])).log()),
        (FedShift(source="global", prior="uniform"), PRIOR.log()),
    ],
    ids=str,
)
def test_the_shift_is_the_log_of_source_over_prior(method: FedShift, want: Tensor) -> None:
    got = shift(method, [6, 0, 1], PRIOR.tolist())
    torch.testing.assert_close(got - got.mean(), want - want.mean(), atol=1e-6, rtol=0)


def test_the_server_learns_the_pooled_smoothed_shares_and_clients_keep_their_counts() -> None:
    fed = counted([0, 0, 0, 1], [2, 2], [1, 2, 1, 1, 1, 1])
    state, engine = run(fed, FedShift(), 0)
    own = torch.tensor([[3.0, 1, 0], [0, 0, 2], [0, 5, 1]], dtype=torch.float64)
    n = own.sum(1, keepdim=True)
    assert torch.equal(engine.memory.save()["fedshift"]["rows"]["counts"], own)
    pooled = (n * (own + 1) / (n + 3)).sum(0) / n.sum()
    torch.testing.assert_close(state.slots["fedshift"]["shares"], pooled)
    assert not FedShift.reveals


def test_an_equal_class_mix_and_equal_sizes_are_fedavg() -> None:
    fed = counted(*[[0, 0, 0, 1, 2, 2], [2, 1, 0, 0, 2, 0], [0, 1, 0, 2, 0, 2]])
    one, _ = run(fed, FedShift(), 3)
    other, _ = run(fed, FedAvg(), 3)
    assert float(tree.norm(tree.sub(one.params, other.params))) < 1e-12


def test_it_counts_classes_after_resampling() -> None:
    fed = federation()
    _, engine = run(fed, FedShift() + Astraea(gamma=1, tau_d=1.2, mediator_epochs=1, augment="repeat"), 0)
    labels = engine.y[engine.indices].split((engine.offsets[1:] - engine.offsets[:-1]).tolist())
    want = torch.stack([torch.bincount(own, minlength=3) for own in labels]).double()
    assert int(want.sum()) != len(fed.indices)  # something was resampled
    assert torch.equal(engine.memory.save()["fedshift"]["rows"]["counts"], want)


# -- refused -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prior": "unifrom"}, "did you mean 'uniform'"),
        ({"prior": (0.5, 0.4)}, "a sum of 1"),
        ({"prior": (1.0, 0.0)}, "above 0"),
        ({"prior": ()}, "above 0"),
        ({"source": "remote"}, "source='remote'"),
        ({"source": "global"}, "shifts nothing"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_a_meaningless_setting_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedShift(**settings)


@dataclass(frozen=True)
class Squared(Method):
    name = "squared"

    def loss(self, logits: Tensor, y: Tensor, env: Any) -> Tensor:
        return logits.square().sum(-1)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (FedShift(prior=(0.5, 0.5)), "expected 3 shares, one per class, not 2"),
        (FedShift() + Squared(), "fedshift changes the cross entropy, which squared replaces"),
        (
            FedShift(prior="uniform") + ClassWeights(),
            r"fedshift and class_weights each correct for the class shares of all clients \(fedshift by prior='unif",
        ),
        (FedShift(prior="uniform") + FedRE(), "fedshift and fedre"),
        (FedShift() + ClassWeights(rule="ratio"), "class_weights and fedshift each correct"),
    ],
    ids=str,
)
def test_a_meaningless_pair_is_refused(method: Method, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(federation(), method, 0)


@pytest.mark.parametrize("other", [Focal(), ClassWeights(), FedRE(beta=0.01)], ids=str)
def test_it_combines_with_methods_that_correct_for_something_else(other: Method) -> None:
    run(federation(), FedShift() + other, 1)


# -- Theorem 1 -----------------------------------------------------------------------------------------------------
SHARES = torch.tensor([[0.90, 0.05, 0.05], [0.02, 0.96, 0.02], [0.20, 0.02, 0.78], [0.20, 0.02, 0.78]])


@cache
def gaussians(n: int = 8000) -> Federation:
    """Three Gaussian classes with one covariance, which softmax regression describes without error. Every client has
    every class, in very different shares. Rounds have so many steps that clients nearly end at their own optimum."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.tensor([[1.2, 0.0], [-0.6, 1.0], [-0.6, -1.0]])
    y = torch.cat([torch.arange(3).repeat_interleave((n * share).round().long()) for share in SHARES])
    torch.manual_seed(0)
    return Federation(
        network=Network(nn.Linear(2, 3)),
        x=centres[y] + torch.randn(len(y), 2, generator=draw),
        y=y,
        offsets=n * torch.arange(len(SHARES) + 1),
        indices=torch.arange(len(y)),
        classes=tuple("abc"),
        local=Local(lr=1.0, batch="full", epochs=60),
    )


@cache
def pooled_optimum() -> tuple[Tensor, float]:
    """The optimum of softmax regression on all samples together, by Newton's method, and its standard error."""
    fed = gaussians()
    x = torch.cat([fed.x.double(), torch.ones(len(fed.y), 1).double()], 1)

    def loss(w: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x @ w.view(3, 3).T, fed.y)

    w = torch.zeros(9).double()
    for _ in range(10):
        inverse = torch.linalg.pinv(torch.func.hessian(loss)(w), rtol=1e-8)  # 3 directions do not change the softmax
        w = w - inverse @ torch.func.grad(loss)(w)
    assert float(torch.func.grad(loss)(w).norm()) < 1e-12
    return _without_common_part(w.view(3, 3)), float((inverse.trace() / len(fed.y)).sqrt())


def _without_common_part(w: Tensor) -> Tensor:
    """Remove the part that is common to the weights of all classes; it does not change any probability."""
    return w - w.mean(0)


def _weights(params: Tree) -> Tensor:
    return _without_common_part(torch.cat([params["weight"], params["bias"][:, None]], 1))


def test_theorem_1_clients_share_the_centralised_optimum() -> None:
    best, error = pooled_optimum()
    shifted, _ = run(gaussians(), FedShift(), 4)
    plain, _ = run(gaussians(), FedAvg(), 4)
    assert float((_weights(shifted.params) - best).norm()) < 2 * error
    assert float((_weights(plain.params) - best).norm()) > 8 * error

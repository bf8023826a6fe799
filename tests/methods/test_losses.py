"""Focal loss and class weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.method import FedAvg, Method
from equipoise.core.round import one_round, start
from equipoise.core.turn import State
from equipoise.methods import ClassWeights, FedRE, Focal, RatioLoss
from tests.federations import federation


def run(fed: Federation, method: Method, rounds: int) -> State:
    engine, chain = Stacked(fed, precision="float64"), Chain(method)
    state = start(fed, chain, engine)
    for _ in range(rounds):
        state, _ = one_round(state, fed, chain, engine)
    return state


def focal(logits: Tensor, y: Tensor, gamma: float) -> Tensor:
    losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    return Focal(gamma=gamma).losses(losses, logits, y, None)  # type: ignore[arg-type]


# -- focal ---------------------------------------------------------------------------------------------------------
def test_focal_scales_a_loss_by_the_probability_that_is_missing() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])  # probabilities 1/4 and 3/4
    got = focal(logits, torch.tensor([0, 1]), gamma=2.0)
    torch.testing.assert_close(got, torch.tensor([0.75**2 * math.log(4), 0.25**2 * math.log(4 / 3)]))


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("margin", [0.0, 20.0, 200.0, -200.0])
def test_focal_is_safe_where_the_model_is_certain(gamma: float, margin: float) -> None:
    logits = torch.tensor([[margin, 0.0]], requires_grad=True)
    loss = focal(logits, torch.tensor([0]), gamma).sum()
    (slope,) = torch.autograd.grad(loss, logits)
    assert bool(loss.isfinite())
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize("gamma", [-1.0, float("nan"), float("inf")])
def test_focal_refuses_a_meaningless_gamma(gamma: float) -> None:
    with pytest.raises(ConfigError, match="gamma="):
        Focal(gamma=gamma)


# -- class weights -------------------------------------------------------------------------------------------------
COUNTS = torch.tensor([10.0, 30.0, 60.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("method", "want"),
    [
        (ClassWeights(), [100 / 30, 100 / 90, 100 / 180]),
        (ClassWeights(rule="effective", beta=0.0), [1, 1, 1]),
        (ClassWeights(rule="ratio"), [0.1, 0.3, 0.6]),
    ],
    ids=str,
)
def test_weights_by_rule(method: ClassWeights, want: list[float]) -> None:
    torch.testing.assert_close(method.weights(COUNTS), torch.tensor(want, dtype=torch.float64))


def test_effective_numbers_lie_between_no_weights_and_inverse() -> None:
    near = ClassWeights(rule="effective", beta=1 - 1e-9).weights(COUNTS)
    inverse = ClassWeights().weights(COUNTS)
    torch.testing.assert_close(near, inverse * 3 / inverse.sum(), rtol=1e-5, atol=0)
    middle = ClassWeights(rule="effective", beta=0.98).weights(COUNTS)
    assert 1 < float(middle[0]) < float(near[0])
    assert float(middle.sum()) == pytest.approx(3)


def test_inverse_weights_keep_the_mean_loss() -> None:
    assert float(ClassWeights().weights(COUNTS) @ COUNTS) == pytest.approx(100)


def test_a_class_that_nobody_has_does_not_break_the_others() -> None:
    for rule in ("inverse", "effective", "ratio"):
        assert bool(ClassWeights(rule=rule).weights(torch.tensor([0.0, 5.0])).isfinite().all())  # type: ignore[arg-type]


def note(method: ClassWeights, weights: list[float], counts: list[float]) -> list[float]:
    class Env:
        memory = {"counts": torch.tensor(counts)}  # noqa: RUF012
        msg = {"weights": torch.tensor(weights)}  # noqa: RUF012

    found: list[float] = method.begin(Env, None)["weights"].tolist()  # type: ignore[arg-type]
    return found


def test_the_ratio_divides_by_the_clients_own_shares() -> None:
    ratio = ClassWeights(rule="ratio")
    assert note(ratio, [0.1, 0.3, 0.6], [8.0, 2.0, 0.0]) == pytest.approx([0.125, 1.5, 1.0])
    assert note(ratio, [1 / 3, 2 / 3, 0], [5.0, 10.0, 0.0]) == [1.0, 1.0, 1.0]


def test_clipping_holds_weights_on_both_sides() -> None:
    assert note(ClassWeights(clip=2.0), [0.1, 1.5, 9.0], []) == [0.5, 1.5, 2.0]


def single_class_clients() -> Federation:
    fed = federation(sizes=(8, 8, 8), cohort=0)
    y = fed.y.clone()
    y[fed.indices] = torch.tensor([0, 1, 2]).repeat_interleave(8)
    indices, offsets = fed.indices[:20], torch.tensor([0, 8, 16, 20])  # the third client has half as many samples
    return replace(fed, y=y, indices=indices, offsets=offsets)


def test_normalised_weights_cancel_at_a_client_of_one_class_and_others_do_not() -> None:
    fed = single_class_clients()
    plain = run(fed, FedAvg(), 2)
    normalised = run(fed, ClassWeights(normalised=True), 2)
    weighted = run(fed, ClassWeights(), 2)
    assert float(tree.norm(tree.sub(plain.params, normalised.params))) < 1e-12
    assert float(tree.norm(tree.sub(plain.params, weighted.params))) > 1e-3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rule": "inverted"}, "did you mean 'inverse'"),
        ({"beta": 1.0}, "beta=1.0"),
        ({"clip": 0.5}, "clip=0.5"),
    ],
)
def test_a_meaningless_setting_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClassWeights(**settings)


@pytest.mark.parametrize("other", [FedRE(), RatioLoss()], ids=str)
def test_another_weighing_of_classes_is_refused(other: Method) -> None:
    with pytest.raises(ConfigError, match="each weigh the classes"):
        run(federation(), ClassWeights() + other, 0)

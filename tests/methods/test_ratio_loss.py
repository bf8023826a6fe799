"""Ratio-Loss: ratios computed by hand, the rounds in which weights change, and both variants over many rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.round import one_round, start
from equipoise.core.turn import State
from equipoise.engines import Serial
from equipoise.methods import FedAvgM, FedRE, RatioLoss
from equipoise.methods.ratio_loss import ratios, row_ratios
from equipoise.methods.shared import monitor
from tests.federations import federation, linear
from tests.reference.ratio_loss import ratio_loss


def train(fed: Federation, method: Method, rounds: int, engine: type = Stacked) -> list[State]:
    runner, chain = engine(fed, precision="float64"), Chain(method)
    states = [start(fed, chain, runner)]
    for _ in range(rounds):
        states.append(one_round(states[-1], fed, chain, runner)[0])
    return states


def weights(state: State) -> Tensor:
    found: Tensor = state.slots["ratio_loss"]["weights"]
    return found


def test_a_ratio_is_a_quotient_of_sums_over_the_chosen_coordinates() -> None:
    delta = torch.tensor([[[4.0, 0.0], [1.0, 2.0]], [[-1.0, 0.0], [3.0, 1.0]], [[-2.0, 0.0], [-1.0, 9.0]]])
    chosen = monitor.select(delta, 1.25)
    assert chosen.nonzero().tolist() == [[0, 0, 0], [0, 0, 1], [1, 1, 0], [2, 1, 1]]
    found = ratios(delta, chosen).tolist()
    assert found[0] == pytest.approx(4 / 1.5)
    assert found[1] == 10  # the moves of the other classes cancel, so the denominator is zero
    assert found[2] == pytest.approx(9 / 1.5)


def test_row_ratios_use_the_row_of_the_class_without_columns_that_others_do_not_move() -> None:
    delta = torch.zeros(3, 3, 2)
    delta[:, 0] = torch.tensor([[-6.0, -4.0], [1.0, 0.0], [2.0, 0.0]])  # the others do not move the second column
    delta[:, 1] = torch.tensor([[1.0, 1.0], [-2.0, -6.0], [1.0, 2.0]])
    found = row_ratios(delta).tolist()
    assert found == pytest.approx([4.0, (2 + 4) / 2, 10.0])


def test_ratios_are_capped() -> None:
    method = RatioLoss(alpha=0.5, beta=0.1, cap=20.0)
    assert method.weights(torch.tensor([3.0, 900.0])).tolist() == pytest.approx([0.8, 2.5])


def test_the_first_round_has_no_weights_and_every_round_sets_those_of_the_next() -> None:
    fed = federation(local=Local(lr=0.2, batch=4))
    states = train(fed, RatioLoss(), 3)
    assert weights(states[0]).tolist() == [1, 1, 1]
    plain = train(fed, Chain(), 1)
    torch.testing.assert_close(states[1].params, plain[1].params, rtol=0, atol=0)
    assert not torch.equal(weights(states[1]), weights(states[2]))
    # Weights come from the model that the round began with, so the server's step does not change the first ones.
    torch.testing.assert_close(weights(states[1]), weights(train(fed, RatioLoss() + FedAvgM(lr=0.1), 1)[1]))


def test_the_variant_of_climb_sets_weights_at_once_and_every_five_rounds() -> None:
    fed = federation()
    found = [weights(state) for state in train(fed, RatioLoss(variant="climb"), 6)]
    assert not torch.equal(found[0], torch.ones(3).double())
    assert all(torch.equal(found[0], later) for later in found[1:5])
    assert not torch.equal(found[4], found[5])
    assert torch.equal(found[5], found[6])


@pytest.mark.parametrize("engine", [Stacked, Serial])
@pytest.mark.parametrize("variant", ["official", "climb"])
def test_many_rounds_equal_the_reference_loop(variant: str, engine: type) -> None:
    torch.manual_seed(0)
    module = linear()
    fed = federation(module)
    last = train(fed, RatioLoss(variant=variant), 7, engine)[-1]  # type: ignore[arg-type]
    want, counts = ratio_loss(fed, module, 7, fed.local, variant=variant)
    torch.testing.assert_close(last.params, want, rtol=1e-8, atol=1e-8)
    if variant == "official":
        torch.testing.assert_close(last.slots["ratio_loss"]["counts"], counts, rtol=1e-8, atol=1e-8)


def test_normalised_weights_cancel_at_clients_of_one_class() -> None:
    """This is why the variant "climb" does little where every client holds a single class."""
    fed = federation(sizes=(8, 8, 8), cohort=0)
    y = fed.y.clone()
    y[fed.indices] = torch.arange(3).repeat_interleave(8)
    fed = replace(fed, y=y)
    plain = train(fed, Chain(), 2)[-1].params
    torch.testing.assert_close(train(fed, RatioLoss(variant="climb"), 2)[-1].params, plain)
    official = train(fed, RatioLoss(), 2)[-1].params
    assert not torch.allclose(official["0.weight"], plain["0.weight"], rtol=1e-3)


def test_the_counts_are_metrics_of_the_run() -> None:
    fed = federation()
    slot = train(fed, RatioLoss(), 1)[-1].slots["ratio_loss"]
    assert RatioLoss().metrics(slot) == {f"count_{c}": float(slot["counts"][c]) for c in range(3)}
    assert float(slot["counts"].min()) > 0
    slot = train(fed, RatioLoss(variant="climb"), 1)[-1].slots["ratio_loss"]
    assert RatioLoss(variant="climb").metrics(slot) == {}


def test_it_needs_samples_at_the_server_and_a_row_per_class() -> None:
    missing = federation(auxiliary=0)
    with pytest.raises(ConfigError, match=r"ratio_loss needs samples of every class .* data.auxiliary = 32"):
        start(missing, Chain(RatioLoss()), Stacked(missing))
    hidden = federation(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Flatten()))
    with pytest.raises(ConfigError, match="one row of weights for each of the 3 classes"):
        start(hidden, Chain(RatioLoss()), Stacked(hidden))


def test_weighting_the_classes_twice_is_refused() -> None:
    fed = federation()
    with pytest.raises(ConfigError, match="fedre and ratio_loss each weigh the classes"):
        start(fed, FedRE() + RatioLoss(), Stacked(fed))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alpha": -0.1}, r"alpha=-0.1\): expected a number, 0 or above"),
        ({"threshold": 0.8}, r"threshold=0.8\): expected a number, 1 or above"),
        ({"cap": 0.0}, r"cap=0.0\): expected a number above 0"),
        ({"variant": "clim"}, "did you mean 'climb'"),
    ],
)
def test_a_meaningless_setting_is_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RatioLoss(**settings)  # type: ignore[arg-type]

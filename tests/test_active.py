from __future__ import annotations

import pytest
import torch

from equipoise.engines import Serial, Stacked
from equipoise.errors import ConfigError
from equipoise.method import Chain
from equipoise.methods import Active
from equipoise.round import one_round, start
from tests.federations import federation, linear
from tests.reference.selection import active


@pytest.mark.parametrize("engine", [Stacked, Serial])
@pytest.mark.parametrize("alphas", [(0.5, 0.5, 0.3), (0.75, 0.01, 0.1), (0.0, 5.0, 0.0)])
def test_cohorts_are_those_of_the_reference(alphas: tuple[float, float, float], engine: type) -> None:
    torch.manual_seed(0)
    module = linear()
    fed = federation(module, sizes=(7, 12, 3, 20, 5, 9, 6), cohort=4)
    chain, runner = Chain(Active(*alphas)), engine(fed, precision="float64")
    state, cohorts = start(fed, chain, runner), []
    for _ in range(6):
        cohorts.append(chain.select(state.slots, fed, state.round).tolist())
        state, _ = one_round(state, fed, chain, runner)
    want, selected = active(fed, module, 6, fed.local, *alphas)
    assert cohorts == selected
    for name, value in state.params.items():
        torch.testing.assert_close(value, want[name], rtol=1e-8, atol=1e-8)


def often(method: Active, rounds: int = 400) -> torch.Tensor:
    """How often each of ten clients, of values 0 to 9, is among the four selected."""
    fed = federation(sizes=(3,) * 10, cohort=4)
    slot = {"value": torch.arange(10.0)}
    chosen = [method.select(slot, fed, round) for round in range(rounds)]
    assert all(len(ids.unique()) == 4 for ids in chosen)
    return torch.bincount(torch.cat(chosen), minlength=10) / rounds


def test_clients_of_high_value_come_more_often() -> None:
    share = often(Active(alpha1=0.0, alpha2=0.5, alpha3=0.0))
    assert share[7:].mean() > 2 * share[:3].mean()


def test_without_preference_all_come_alike() -> None:
    assert (often(Active(alpha1=0.0, alpha2=0.0, alpha3=0.0)) - 0.4).abs().max() < 0.1


def test_clients_left_aside_only_come_evenly() -> None:
    assert often(Active(alpha1=0.5, alpha2=0.0, alpha3=0.0))[:5].tolist() == [0.0] * 5
    share = often(Active(alpha1=0.5, alpha2=0.0, alpha3=0.25))  # three by value, one evenly from the seven left
    assert (share[:5] - 1 / 7).abs().max() < 0.07


def test_too_few_candidates_are_filled_up_evenly() -> None:
    share = often(Active(alpha1=0.8, alpha2=0.0, alpha3=0.0))
    assert share[8:].tolist() == [1.0, 1.0]
    assert (share[:8] - 0.25).abs().max() < 0.1


def test_full_participation_is_left_alone() -> None:
    fed = federation(cohort=0)
    chain, engine = Chain(Active()), Stacked(fed)
    state = start(fed, chain, engine)
    assert chain.select(state.slots, fed, 0).tolist() == list(range(fed.clients))


@pytest.mark.parametrize("settings", [{"alpha1": 1.0}, {"alpha2": -1.0}, {"alpha3": 1.5}], ids=str)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="active"):
        Active(**settings)

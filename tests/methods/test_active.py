from __future__ import annotations

import pytest
import torch

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.round import one_round, start
from equipoise.engines import Serial
from equipoise.methods import Active
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
        cohorts.append(chain.select(state.slots, fed.server_view, state.round).tolist())
        state, _ = one_round(state, fed, chain, runner)
    want, selected = active(fed, module, 6, fed.local, *alphas)
    assert cohorts == selected
    for name, value in state.params.items():
        torch.testing.assert_close(value, want[name], rtol=1e-8, atol=1e-8)


def selected_share(method: Active, rounds: int = 400) -> torch.Tensor:
    """The share of rounds in which each of ten clients, with the values 0 to 9, is among the four selected."""
    fed = federation(sizes=(3,) * 10, cohort=4)
    slot = {"value": torch.arange(10.0)}
    chosen = [method.select(slot, fed.server_view, round) for round in range(rounds)]
    assert all(len(ids.unique()) == 4 for ids in chosen)
    return torch.bincount(torch.cat(chosen), minlength=10) / rounds


def test_clients_of_high_value_are_selected_more_often() -> None:
    share = selected_share(Active(alpha1=0.0, alpha2=0.5, alpha3=0.0))
    assert share[7:].mean() > 2 * share[:3].mean()


def test_without_preference_all_clients_are_selected_equally_often() -> None:
    assert (selected_share(Active(alpha1=0.0, alpha2=0.0, alpha3=0.0)) - 0.4).abs().max() < 0.1


def test_clients_that_are_set_aside_are_only_drawn_uniformly() -> None:
    assert selected_share(Active(alpha1=0.5, alpha2=0.0, alpha3=0.0))[:5].tolist() == [0.0] * 5
    share = selected_share(
        Active(alpha1=0.5, alpha2=0.0, alpha3=0.25)
    )  # three by value, one uniformly from the other seven
    assert (share[:5] - 1 / 7).abs().max() < 0.07


def test_if_candidates_are_too_few_the_rest_is_drawn_uniformly() -> None:
    share = selected_share(Active(alpha1=0.8, alpha2=0.0, alpha3=0.0))
    assert share[8:].tolist() == [1.0, 1.0]
    assert (share[:8] - 0.25).abs().max() < 0.1


def test_if_all_clients_take_part_all_are_selected() -> None:
    fed = federation(cohort=0)
    chain, engine = Chain(Active()), Stacked(fed)
    state = start(fed, chain, engine)
    assert chain.select(state.slots, fed.server_view, 0).tolist() == list(range(fed.clients))


@pytest.mark.parametrize("settings", [{"alpha1": 1.0}, {"alpha2": -1.0}, {"alpha3": 1.5}], ids=str)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="active"):
        Active(**settings)

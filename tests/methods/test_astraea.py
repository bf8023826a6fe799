"""Astraea: warped copies of images, its metrics, the methods it refuses, and the data that other methods see."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.method import FedAvg, Method
from equipoise.core.round import one_round, start
from equipoise.core.turn import State
from equipoise.engines import Serial
from equipoise.methods import Astraea, FedNova, FedProx, FedShift, Scaffold
from equipoise.methods.shared.mediators import kld
from tests.contract.test_reference import agree, run
from tests.federations import dropout_cnn, federation, image_federation, norm_cnn
from tests.reference.astraea import Warp, astraea, mediators, rebalanced
from tests.reference.loop import client_rows, given_dropout

ENGINES = [pytest.param(Stacked, {"width": 3}, id="stacked"), pytest.param(Serial, {}, id="serial")]


def rounds(fed: Federation, method: Method, count: int = 1, **options: Any) -> tuple[State, Engine]:
    chain, engine = Chain(method), Stacked(fed, precision="float64", **options)
    state = start(fed, chain, engine)
    for _ in range(count):
        state, _ = one_round(state, fed, chain, engine)
    return state, engine


@pytest.mark.parametrize(("engine", "options"), ENGINES)
@pytest.mark.parametrize("network", [norm_cnn, dropout_cnn])
def test_copies_rendered_in_batches_equal_stored_copies(network: Any, engine: type, options: dict[str, int]) -> None:
    torch.manual_seed(3)
    module = network()
    fed = image_federation(module)
    method = Astraea(gamma=2, tau_d=1.5, shift=0.2, rotation=30, shear=20, zoom=0.3)
    want = astraea(
        fed, given_dropout(module), 2, fed.local, gamma=2, mediator_epochs=2, tau_d=1.5, warp=Warp(0.2, 30, 20, 0.3)
    )
    agree(run(engine, fed, method, rounds=2, **options), want, 1e-8)


def test_a_step_with_warps_compiles_to_one_graph() -> None:
    torch.manual_seed(3)
    fed = image_federation(dropout_cnn(), sizes=(8, 8), cohort=0)
    torch.compiler.reset()
    chain = Chain(Astraea(gamma=1, mediator_epochs=1, tau_d=1.5))
    engine = Stacked(fed, precision="float64", compile="aot_eager")
    one_round(start(fed, chain, engine), fed, chain, engine)


def test_warps_change_only_the_copies() -> None:
    torch.manual_seed(3)
    fed = image_federation(dropout_cnn())
    still = Astraea(gamma=2, tau_d=1.5, shift=0, rotation=0, shear=0, zoom=0)
    repeated, _ = rounds(fed, Astraea(gamma=2, tau_d=1.5, augment="repeat"))
    agree(rounds(fed, still)[0].params, repeated.params, 1e-9)
    with pytest.raises(AssertionError):
        agree(rounds(fed, Astraea(gamma=2, tau_d=1.5))[0].params, repeated.params, 1e-9)


def test_balanced_classes_and_mediators_of_one_client_are_fedavg_bit_by_bit() -> None:
    torch.manual_seed(3)
    fed = image_federation(dropout_cnn(), sizes=(9, 3, 6, 6, 3))
    for client in range(fed.clients):
        rows = client_rows(fed, client)
        fed.y[rows] = torch.arange(len(rows)) % 3
    one, _ = rounds(fed, Astraea(gamma=1, mediator_epochs=1, tau_d=3.5), 2)
    other, _ = rounds(fed, FedAvg(), 2)
    assert all(torch.equal(value, other.params[name]) for name, value in one.params.items())


def test_the_server_reports_divergences_and_storage() -> None:
    fed = federation()
    method = Astraea(gamma=2, tau_d=1.5, augment="repeat")
    state, engine = rounds(fed, method)
    numbers = method.metrics(state.slots["astraea"])
    new = rebalanced(fed, tau_d=1.5)

    def counts(of: Federation, group: list[int]) -> torch.Tensor:
        return torch.bincount(torch.cat([of.y[client_rows(of, c)] for c in group]), minlength=3)

    every = range(fed.clients)
    before, after = (torch.stack([counts(f, [c]) for c in every]) for f in (fed, new))
    assert numbers["kld_clients"] == pytest.approx(float(kld(before).mean()))
    assert numbers["kld_resampled"] == pytest.approx(float(kld(after).mean()))
    chained = [counts(new, group) for group in mediators(new, fed.draw(0).tolist(), 2)]
    assert numbers["kld_mediators"] == pytest.approx(float(kld(torch.stack(chained)).mean()))
    grown = (after.sum(0) - before.sum(0)).clamp(min=0).sum() / before.sum()
    assert numbers["storage"] == pytest.approx(float(grown))
    assert engine.sizes(torch.arange(fed.clients)).tolist() == after.sum(1).tolist()


def test_a_second_start_resamples_the_original_data() -> None:
    fed = federation()
    chain, engine = Chain(Astraea(gamma=2, tau_d=1.5, augment="repeat")), Stacked(fed)
    start(fed, chain, engine)
    once = engine.indices.clone()
    start(fed, chain, engine)
    assert torch.equal(engine.indices, once)
    assert len(once) != len(fed.indices)


def test_an_empty_client_of_the_partition_is_left_out() -> None:
    state, _ = rounds(federation(sizes=(7, 0, 5, 9), cohort=0), Astraea(gamma=2, tau_d=1.5, augment="repeat"))
    assert state.slots["astraea"]["counts"][1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("method", [Scaffold(), FedNova()], ids=str)
def test_methods_that_need_clients_to_start_from_the_global_model_refuse_mediators(method: Method) -> None:
    fed = federation()
    for lanes in (Astraea(gamma=2, tau_d=None, mediator_epochs=1), Astraea(gamma=1, tau_d=None, mediator_epochs=2)):
        with pytest.raises(ConfigError, match=rf"{method.name} is only .*astraea\(gamma=1, mediator_epochs=1\)"):
            start(fed, Chain(lanes + method), Stacked(fed))


OTHERS = [Scaffold(), FedNova(), FedProx(mu=0.3), FedShift()]


@pytest.mark.parametrize("method", OTHERS, ids=str)
def test_other_methods_see_the_resampled_data(method: Method) -> None:
    """The step counts of SCAFFOLD and FedNova and the class counts of FedShift are those of the resampled data."""
    fed = federation()
    resampling = Astraea(gamma=1, mediator_epochs=1, tau_d=1.2, augment="repeat")
    one, _ = rounds(fed, method + resampling, 3)
    other, _ = rounds(rebalanced(fed, tau_d=1.2), method, 3)
    agree(one.params, other.params, 1e-10)
    with pytest.raises(AssertionError):
        agree(one.params, rounds(fed, method, 3)[0].params, 1e-10)


def test_tables_are_not_warped() -> None:
    with pytest.raises(ConfigError, match=r"samples of shape \(5,\) are not images; use astraea\(augment='repeat'\)"):
        start(federation(), Chain(Astraea()), Stacked(federation()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 0}, r"gamma=0\): expected a whole number, 1 or above"),
        ({"mediator_epochs": 0}, r"mediator_epochs=0\)"),
        ({"tau_d": 0.0}, r"tau_d=0.0\): expected a number above 0"),
        ({"sign": "pluss"}, r"did you mean 'plus'"),
        ({"reschedule": "never"}, r"expected one of round, once"),
        ({"augment": "wrap"}, r"did you mean 'warp'"),
        ({"shift": -0.1}, r"shift=-0.1\)"),
        ({"rotation": 400.0}, r"rotation=400.0\): expected a number in \[0, 360\)"),
        ({"shear": 90.0}, r"shear=90.0\): expected a number in \[0, 90\)"),
        ({"zoom": 1.0}, r"zoom=1.0\): expected a number in \[0, 1\)"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Astraea(**settings)


@pytest.mark.data
@pytest.mark.skipif("EQUIPOISE_DATA" not in os.environ, reason="EQUIPOISE_DATA is not set")
def test_mediators_halve_the_divergence_of_clients_on_emnist() -> None:
    from equipoise.papers.balance import balance
    from examples.astraea_kld import letters

    fed = letters()
    for method in (Astraea(gamma=10, tau_d=None), Astraea(gamma=10, tau_d=3.5)):
        found = balance(fed, method)
        assert found.mediators < 0.5 * found.clients

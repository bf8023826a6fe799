"""Every method against its reference loop, on both engines: ragged clients, true short batches, partial cohorts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.round import one_round, start
from equipoise.engines import Serial
from equipoise.methods import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedNova,
    FedProx,
    FedRE,
    FedSGD,
    FedYogi,
    RatioLoss,
    Scaffold,
)
from equipoise.models import build
from tests.contract.comparators import COMPARATORS
from tests.contract.remedies import REMEDIES
from tests.federations import dropout_cnn, federation, image_federation, linear, norm_cnn
from tests.reference.fedavg import adaptive_server, fedavg, momentum_server
from tests.reference.fednova import fednova
from tests.reference.fedre import fedre
from tests.reference.loop import State, given_dropout
from tests.reference.ratio_loss import ratio_loss
from tests.reference.scaffold import scaffold

ROUNDS = 3
Reference = Callable[[Federation, nn.Module, int, Local], State]


PROBE = Local(lr=0.05, epochs=3, batch=4)
FEDRE = {"alpha": 0.8, "beta": 0.05, "floor": 0.3}
RATIO = {"alpha": 0.9, "beta": 0.2, "threshold": 1.1, "cap": 20.0}


def estimating(**options: bool) -> FedRE:
    return FedRE(**FEDRE, probe_lr=PROBE.lr, probe_epochs=PROBE.epochs, probe_batch=4, **options)


def full_batch(local: Local) -> Local:
    return replace(local, batch="full", epochs=1)


CASES: dict[str, tuple[Method, Reference]] = {
    "fedavg": (FedAvg(), fedavg),
    "fedsgd": (FedSGD(), lambda f, m, r, s: fedavg(f, m, r, full_batch(s))),
    "fedprox": (FedProx(mu=0.3), lambda f, m, r, s: fedavg(f, m, r, s, mu=0.3)),
    "scaffold": (Scaffold(), scaffold),
    "fednova": (FedNova(), fednova),
    "fedavgm": (
        FedAvgM(momentum=0.7, lr=0.8),
        lambda f, m, r, s: fedavg(f, m, r, s, server=momentum_server(0.7, 0.8)),
    ),
    "scaffold + fedprox": (Scaffold() + FedProx(mu=0.3), lambda f, m, r, s: scaffold(f, m, r, s, mu=0.3)),
    "fednova + fedprox": (FedNova() + FedProx(mu=0.3), lambda f, m, r, s: fednova(f, m, r, s, mu=0.3)),
    "fedre": (estimating(), lambda f, m, r, s: fedre(f, m, r, s, PROBE, **FEDRE)),
    "fedre, normalised, + fedprox": (
        estimating(normalised=True) + FedProx(mu=0.3),
        lambda f, m, r, s: fedre(f, m, r, s, PROBE, **FEDRE, normalised=True, mu=0.3),
    ),
    "ratio_loss": (RatioLoss(**RATIO), lambda f, m, r, s: ratio_loss(f, m, r, s, **RATIO)[0]),
    "ratio_loss + fedprox": (
        RatioLoss(**RATIO) + FedProx(mu=0.3),
        lambda f, m, r, s: ratio_loss(f, m, r, s, **RATIO, mu=0.3)[0],
    ),
    "ratio_loss, climb": (
        RatioLoss(variant="climb"),
        lambda f, m, r, s: ratio_loss(f, m, r, s, variant="climb")[0],
    ),
}
CASES |= COMPARATORS | REMEDIES
for kind in (FedAdam, FedYogi, FedAdagrad):
    method = kind(lr=0.05, b1=0.8, b2=0.95, tau=0.01)

    def reference(f: Federation, m: nn.Module, r: int, s: Local, name: str = kind.name) -> State:
        return fedavg(f, m, r, s, server=adaptive_server(name, 0.05, 0.8, 0.95, 0.01))

    CASES[kind.name] = (method, reference)

LOCALS = {
    "sgd": Local(lr=0.1, batch=4, epochs=2),
    "momentum, decay, clip": Local(
        lr=0.05,
        batch=3,
        epochs=2,
        momentum=0.8,
        weight_decay=0.01,
        clip=0.5,
        schedule="step",
        gamma=0.5,
        every=2,
    ),
    "nesterov, steps per epoch, uniform": Local(
        lr=0.05, momentum=0.6, nesterov=True, steps_per_epoch=3, epochs=2, weighting="uniform"
    ),
    "adam": Local(optimiser="adam", lr=0.01, batch=4, epochs=2, weight_decay=0.01, schedule="cosine", horizon=5),
}


def run(engine: type, fed: Federation, method: Method, rounds: int = ROUNDS, **options: object) -> State:
    chain = Chain(method)
    runner = engine(fed, precision="float64", **options)
    state = start(fed, chain, runner)
    for _ in range(rounds):
        state, _ = one_round(state, fed, chain, runner)
    return {**state.params, **state.buffers}


def agree(got: State, want: State, tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value.detach(), rtol=tolerance, atol=tolerance)


ENGINES = [
    pytest.param(Stacked, {"width": 3}, id="stacked"),
    pytest.param(Stacked, {"width": 64}, id="stacked-all"),
    pytest.param(Serial, {}, id="serial"),
]


@pytest.mark.parametrize(("engine", "options"), ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_method_equals_its_reference_loop(name: str, engine: type, options: dict[str, int]) -> None:
    torch.manual_seed(0)
    module = linear()
    fed = federation(module)
    method, reference = CASES[name]
    agree(run(engine, fed, method, **options), reference(fed, module, ROUNDS, fed.local), 1e-10)


TRAINED = ["fedavg", "fedprox", "fednova", "fednova + fedprox", "fedre", "ratio_loss", "astraea", "afl", "feddyn"]
REFUSED = {("fednova", "adam"), ("fednova + fedprox", "adam")}  # FedNova reads gradients off the steps of SGD


@pytest.mark.parametrize("engine", [Stacked, Serial])
@pytest.mark.parametrize(("name", "local"), [(n, s) for n in TRAINED for s in LOCALS if (n, s) not in REFUSED])
def test_local_training_equals_torch_optim(name: str, local: str, engine: type) -> None:
    method, reference = CASES[name]
    torch.manual_seed(1)
    module = linear()
    fed = federation(module, local=LOCALS[local])
    agree(run(engine, fed, method), reference(fed, module, ROUNDS, fed.local), 1e-10)


@pytest.mark.parametrize("engine", [Stacked, Serial])
@pytest.mark.parametrize(
    "name",
    ["fedavg", "scaffold", "fednova", "climb", "fedre", "ratio_loss", "astraea", "qffl", "fedcurv", "fedpd", "cucb"],
)
@pytest.mark.parametrize("network", [norm_cnn, dropout_cnn])
def test_batch_norm_and_dropout_equal_a_plain_loop(network: Callable[[], nn.Module], name: str, engine: type) -> None:
    torch.manual_seed(2)
    module = network()
    fed = image_federation(module)
    method, reference = CASES[name]
    agree(run(engine, fed, method), reference(fed, given_dropout(module), ROUNDS, fed.local), 1e-9)


@pytest.mark.parametrize("engine", [Stacked, Serial])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "astraea"])
def test_mirrored_and_moved_images_equal_a_plain_loop(name: str, engine: type) -> None:
    torch.manual_seed(2)
    module = dropout_cnn()
    fed = image_federation(module)
    fed = replace(fed, local=replace(fed.local, augment="flip_crop"))
    method, reference = CASES[name]
    agree(run(engine, fed, method), reference(fed, given_dropout(module), ROUNDS, fed.local), 1e-9)


@pytest.mark.parametrize("engine", [Stacked, Serial])
def test_resnet18_equals_a_plain_loop(engine: type) -> None:
    torch.manual_seed(6)
    # Smaller images leave the last batch norms two or three values each: rounding errors then grow beyond all bounds.
    module = build("resnet18", (3, 16, 16), 3, width=8)
    fed = federation(module, sizes=(6, 3, 7), shape=(3, 16, 16), cohort=0)
    agree(run(engine, fed, FedAvg(), rounds=2), fedavg(fed, module, 2, fed.local), 1e-10)

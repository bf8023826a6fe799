"""CLIMB, FedShift, focal loss and class weights, each with its reference loop."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.methods import ClassWeights, Climb, FedAdam, FedNova, FedProx, FedShift, Focal, Scaffold
from tests.reference.climb import climb
from tests.reference.fedavg import adaptive_server, fedavg
from tests.reference.fedshift import shifted_loss
from tests.reference.loop import State
from tests.reference.losses import focal_loss, weighted_loss
from tests.reference.scaffold import scaffold

Reference = Callable[[Federation, nn.Module, int, Local], State]

DUALS = {"eta": 3.0, "epsilon": 0.01, "cap": 0.5, "every": 1}
GIVEN = (0.2, 0.3, 0.5)

REMEDIES: dict[str, tuple[Method, Reference]] = {
    "climb": (Climb(**DUALS), lambda f, m, r, s: climb(f, m, r, s, **DUALS)),
    "climb, every second round": (
        Climb(eta=3.0, every=2),
        lambda f, m, r, s: climb(f, m, r, s, eta=3.0, epsilon=0.002, cap=5.0, every=2),
    ),
    "climb, cohort": (
        Climb(**DUALS, over="cohort"),
        lambda f, m, r, s: climb(f, m, r, s, **DUALS, over="cohort"),
    ),
    "climb, size, cohort": (
        Climb(**DUALS, weighting="size", over="cohort"),
        lambda f, m, r, s: climb(f, m, r, s, **DUALS, weighting="size", over="cohort"),
    ),
    "climb, size": (
        Climb(**DUALS, weighting="size"),
        lambda f, m, r, s: climb(f, m, r, s, **DUALS, weighting="size"),
    ),
    "climb, clipped": (
        Climb(eta=30.0, cap=9.0, every=1, negative="clip"),
        lambda f, m, r, s: climb(f, m, r, s, eta=30.0, epsilon=0.002, cap=9.0, every=1, clip=True),
    ),
    "climb, reference": (
        Climb(preset="mnist_reference", every=1),
        lambda f, m, r, s: climb(
            f, m, r, s, eta=2.0 / f.clients, epsilon=0.01, cap=5.0, every=1, batch_sum=True, stale=True
        ),
    ),
    "climb, resilient": (
        Climb(**DUALS, slack=1.5, slack_eta=0.4),
        lambda f, m, r, s: climb(f, m, r, s, **DUALS, slack=1.5, slack_eta=0.4),
    ),
    "climb + fedprox": (Climb(**DUALS) + FedProx(mu=0.3), lambda f, m, r, s: climb(f, m, r, s, **DUALS, mu=0.3)),
    "climb + scaffold": (Climb(**DUALS) + Scaffold(), lambda f, m, r, s: climb(f, m, r, s, **DUALS, scaffold=True)),
    "climb + fednova": (Climb(**DUALS) + FedNova(), lambda f, m, r, s: climb(f, m, r, s, **DUALS, nova=True)),
    "climb + fedadam": (
        Climb(**DUALS) + FedAdam(lr=0.05, b1=0.8, b2=0.95, tau=0.01),
        lambda f, m, r, s: climb(f, m, r, s, **DUALS, server=adaptive_server("fedadam", 0.05, 0.8, 0.95, 0.01)),
    ),
    "climb + fedshift": (  # the multipliers are computed from the plain cross entropy
        Climb(**DUALS) + FedShift(prior="uniform"),
        lambda f, m, r, s: climb(f, m, r, s, **DUALS, client_loss=shifted_loss(f, prior="uniform")),
    ),
    "fedshift": (FedShift(), lambda f, m, r, s: fedavg(f, m, r, s, client_loss=shifted_loss(f))),
    "fedshift, given": (
        FedShift(prior=GIVEN, temperature=0.7),
        lambda f, m, r, s: fedavg(f, m, r, s, client_loss=shifted_loss(f, prior=GIVEN, temperature=0.7)),
    ),
    "fedshift, logit adjustment": (
        FedShift(prior="uniform", source="global", temperature=1.5),
        lambda f, m, r, s: fedavg(
            f, m, r, s, client_loss=shifted_loss(f, prior="uniform", source="global", temperature=1.5)
        ),
    ),
    "scaffold + fedshift": (
        Scaffold() + FedShift(),
        lambda f, m, r, s: scaffold(f, m, r, s, client_loss=shifted_loss(f)),
    ),
    "focal": (Focal(gamma=2.0), lambda f, m, r, s: fedavg(f, m, r, s, loss=focal_loss(2.0))),
    "focal + fedprox": (
        Focal(gamma=0.5) + FedProx(mu=0.3),
        lambda f, m, r, s: fedavg(f, m, r, s, loss=focal_loss(0.5), mu=0.3),
    ),
    "class_weights": (
        ClassWeights(rule="inverse"),
        lambda f, m, r, s: fedavg(f, m, r, s, client_loss=weighted_loss(f, "inverse")),
    ),
    "class_weights, effective, normalised": (
        ClassWeights(rule="effective", beta=0.9, normalised=True),
        lambda f, m, r, s: fedavg(f, m, r, s, client_loss=weighted_loss(f, "effective", normalised=True, beta=0.9)),
    ),
    "class_weights, ratio, clipped": (
        ClassWeights(rule="ratio", clip=1.4),
        lambda f, m, r, s: fedavg(f, m, r, s, client_loss=weighted_loss(f, "ratio", clip=1.4)),
    ),
}

"""The methods and chains that the contract runs over. A new method adds one row."""

from __future__ import annotations

from equipoise.core.chain import Chain
from equipoise.core.method import FedAvg
from equipoise.methods import (
    AFL,
    CUCB,
    QFFL,
    Active,
    Astraea,
    ClassWeights,
    Climb,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedCurv,
    FedDyn,
    FedNova,
    FedNTD,
    FedPD,
    FedProx,
    FedRE,
    FedSGD,
    FedShift,
    FedYogi,
    Focal,
    RatioLoss,
    Scaffold,
)

ALONE = [
    FedAvg(),
    FedSGD(),
    FedProx(mu=0.3),
    Scaffold(),
    FedNova(),
    FedAvgM(momentum=0.7),
    FedAdam(lr=0.05),
    FedYogi(lr=0.05),
    FedAdagrad(lr=0.05),
    Climb(eta=2.0, epsilon=0.01, every=1),
    Climb(preset="mnist_resilient", eta=1.0, slack_eta=0.5, every=2),
    FedShift(),
    Focal(gamma=1.5),
    ClassWeights(rule="ratio", clip=3.0),
    FedRE(beta=0.05, floor=0.5, probe_lr=0.05, probe_epochs=2),
    RatioLoss(beta=0.5),
    Astraea(gamma=2, tau_d=2.0, augment="repeat"),
    AFL(eta=0.5),
    QFFL(q=1.5),
    FedDyn(alpha=0.3),
    FedCurv(lam=0.2),
    FedPD(eta=2.0),
    FedNTD(beta=0.7, tau=1.5),
    CUCB(),
    Active(alpha1=0.5, alpha2=0.5, alpha3=0.3),
]
CHAINED = [
    Scaffold() + FedProx(mu=0.3),
    FedNova() + FedProx(mu=0.3),
    FedProx(mu=0.1) + FedAdam(lr=0.05),
    Scaffold() + FedAvgM(momentum=0.5),
    FedSGD() + FedNova() + FedYogi(lr=0.05),
    Climb(eta=2.0, every=1) + FedProx(mu=0.3),
    Climb(eta=2.0, every=2, over="cohort", weighting="size") + Scaffold(),
    Climb(preset="mnist_reference", every=1) + FedNova(),
    Climb(eta=2.0, every=1, negative="clip") + FedAdam(lr=0.05),
    Climb(eta=2.0, every=1) + FedShift(prior="uniform"),
    Scaffold() + FedShift(prior=(0.2, 0.3, 0.5), temperature=0.5),
    Focal() + FedProx(mu=0.3),
    FedShift() + ClassWeights(rule="effective", beta=0.9, normalised=True),
    FedRE(beta=0.05, floor=0.5, normalised=True) + FedProx(mu=0.3),
    RatioLoss(beta=0.5) + Scaffold(),
    RatioLoss(beta=0.5, variant="climb") + FedProx(mu=0.3),
    Astraea(gamma=3, tau_d=None, mediator_epochs=1, reschedule="once") + FedProx(mu=0.3),
    Astraea(gamma=1, mediator_epochs=1, tau_d=1.5, augment="repeat") + Scaffold(),
    AFL(eta=0.5) + Scaffold(),
    QFFL(q=0.5) + FedProx(mu=0.3),
    FedDyn(alpha=0.3) + FedProx(mu=0.3),
    FedPD(eta=2.0) + Climb(eta=2.0, every=1),
    CUCB() + FedAvgM(momentum=0.5),
    FedNTD(beta=0.5) + Climb(eta=2.0, every=1),
]
EVERY = {str(Chain(method)): Chain(method) for method in (*ALONE, *CHAINED)}

# Settings at which a method does nothing, and how exactly it then equals FedAvg (0: bit by bit).
NEUTRAL = [
    (FedProx(mu=0.0), 0.0),
    (FedAvgM(momentum=0.0, lr=1.0), 0.0),
    (Climb(eta=0.0), 0.0),  # uniform weights in both, as the clients are equal
    (Focal(gamma=0.0), 0.0),
    (ClassWeights(rule="effective", beta=0.0), 0.0),
    (ClassWeights(clip=1.0, normalised=True), 0.0),
    (FedRE(beta=0.0), 0.0),
    (RatioLoss(beta=0.0), 0.0),
    (RatioLoss(beta=0.0, variant="climb"), 0.0),
    (Astraea(gamma=1, tau_d=None, mediator_epochs=1), 0.0),
    (QFFL(q=0.0), 1e-12),
    (FedCurv(lam=0.0), 0.0),
    (FedNTD(beta=0.0), 0.0),
    (FedNova(), 1e-12),  # where all clients take the same number of steps
]

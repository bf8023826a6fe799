"""The methods and chains that the contract runs over. A new method adds one row."""

from __future__ import annotations

from equipoise.method import Chain, FedAvg
from equipoise.methods import FedAdagrad, FedAdam, FedAvgM, FedNova, FedProx, FedSGD, FedYogi, Scaffold

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
]
CHAINED = [
    Scaffold() + FedProx(mu=0.3),
    FedNova() + FedProx(mu=0.3),
    FedProx(mu=0.1) + FedAdam(lr=0.05),
    Scaffold() + FedAvgM(momentum=0.5),
    FedSGD() + FedNova() + FedYogi(lr=0.05),
]
EVERY = {str(Chain(method)): Chain(method) for method in (*ALONE, *CHAINED)}

# Settings at which a method does nothing, and how exactly it then equals FedAvg (0: bit by bit).
NEUTRAL = [
    (FedProx(mu=0.0), 0.0),
    (FedAvgM(momentum=0.0, lr=1.0), 0.0),
    (FedNova(), 1e-12),  # where all clients take the same number of steps
]

"""Measures how balanced clients and mediators are under Astraea, on EMNIST with the letter frequencies of English.

    EQUIPOISE_DATA=folder python examples/astraea_kld.py

The federation has 47 classes with min(available, 60,000 x letter frequency) samples each, divided among 500 clients
by a class-wise Dirichlet partition with alpha = 0.5; a mediator has 10 clients. The script prints a table of the mean
divergence (KLD) of clients and of mediators from the uniform class mix, with and without resampling. Nothing is
trained.
"""

from __future__ import annotations

import sys

from equipoise import data, models
from equipoise.core.errors import EquipoiseError
from equipoise.core.federation import Federation
from equipoise.methods import Astraea
from equipoise.methods.shared import mediators
from equipoise.papers.balance import balance


def letters(seed: int = 0, cohort: int | None = None) -> Federation:
    pool = data.load("emnist", classes=47)
    return data.federate(
        pool,
        lambda: models.build("astraea_cnn", pool.x.shape[1:], 47),
        data.Dirichlet(clients=500, alpha=0.5),
        imbalance=data.Letters(total=60_000),
        cohort=cohort,
        seed=seed,
    )


def main() -> None:
    fed = letters()
    print("| data | clients, KLD | mediators of 10, KLD | mediators / clients | extra samples |")
    print("|---|---|---|---|---|")
    pooled = mediators.kld(fed.class_counts)
    for name, method in {
        "as they are": Astraea(gamma=10, tau_d=None),
        "tau_d = 3.5, plus (as printed)": Astraea(gamma=10, tau_d=3.5),
        "tau_d = 3.5, minus": Astraea(gamma=10, tau_d=3.5, sign="minus"),
        "tau_d = 3.0, plus": Astraea(gamma=10, tau_d=3.0),
    }.items():
        found = balance(fed, method)
        ratio = found.mediators / found.resampled
        print(f"| {name} | {found.resampled:.3f} | {found.mediators:.3f} | {ratio:.2f} | {found.storage:+.1%} |")
    online = balance(letters(cohort=50), Astraea(gamma=10, tau_d=3.5))
    print(f"\nKLD of all samples together, without resampling: {pooled:.3f}.")
    print(f"KLD of mediators with 50 clients online and tau_d = 3.5: {online.mediators:.3f}.")


if __name__ == "__main__":
    try:
        main()
    except EquipoiseError as error:
        sys.exit(f"error: {error}")

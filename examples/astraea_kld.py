"""How balanced clients and mediators are under Astraea: EMNIST with the letter frequencies of English.

    EQUIPOISE_DATA=folder python examples/astraea_kld.py

47 classes, min(available, 60,000 x letter frequency) samples of each, class-wise Dirichlet 0.5 over 500 clients,
mediators of 10. Prints, as a table, the mean divergence (KLD) from the uniform class mix of clients and of mediators,
before and after resampling. Nothing is trained.
"""

from __future__ import annotations

import sys

import torch

from equipoise import data, federation, mediators, models
from equipoise.engines import Stacked
from equipoise.errors import EquipoiseError
from equipoise.federation import Federation
from equipoise.method import Chain
from equipoise.methods import Astraea
from equipoise.round import start
from equipoise.tree import Tree


def letters(seed: int = 0, cohort: int | None = None) -> Federation:
    pool = data.load("emnist", classes=47)
    return federation.build(
        pool,
        lambda: models.build("astraea_cnn", pool.x.shape[1:], 47),
        data.Dirichlet(clients=500, alpha=0.5),
        imbalance=data.Letters(total=60_000),
        cohort=cohort,
        seed=seed,
    )


def opened(fed: Federation, method: Astraea) -> tuple[Tree, torch.Tensor]:
    """The server's slot before the first round, and the divergences of the mediators of that round."""
    chain, engine = Chain(method), Stacked(fed)
    slot = start(fed, chain, engine).slots["astraea"]
    plan = chain.plan(chain.select({"astraea": slot}, fed, 0)[None, :], {"astraea": slot}, fed)
    return slot, mediators.kld(mediators.pooled(slot["counts"], plan))


def main() -> None:
    fed = letters()
    print("| data | clients, KLD | mediators of 10, KLD | mediators / clients | extra samples |")
    print("|---|---|---|---|---|")
    before = mediators.kld(fed.class_counts)
    for name, method in {
        "as they are": Astraea(gamma=10, tau_d=None),
        "tau_d = 3.5, plus (as printed)": Astraea(gamma=10, tau_d=3.5),
        "tau_d = 3.5, minus": Astraea(gamma=10, tau_d=3.5, sign="minus"),
        "tau_d = 3.0, plus": Astraea(gamma=10, tau_d=3.0),
    }.items():
        slot, chained = opened(fed, method)
        clients, groups = float(slot["numbers"]["kld_resampled"]), float(chained.mean())
        extra = float(slot["numbers"]["storage"])
        print(f"| {name} | {clients:.3f} | {groups:.3f} | {groups / clients:.2f} | {extra:+.1%} |")
    online = letters(cohort=50)
    slot, chained = opened(online, Astraea(gamma=10, tau_d=3.5))
    print(f"\nAll data together, before: {before:.3f}. With 50 clients online, tau_d = 3.5: {chained.mean():.3f}.")


if __name__ == "__main__":
    try:
        main()
    except EquipoiseError as error:
        sys.exit(f"error: {error}")

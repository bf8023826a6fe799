"""How balanced clients and mediators are under Astraea, before anything is trained."""

from __future__ import annotations

from typing import NamedTuple

from equipoise import mediators, runs
from equipoise.config import Config
from equipoise.engines import Stacked
from equipoise.errors import ConfigError
from equipoise.federation import Federation
from equipoise.method import Chain
from equipoise.methods import Astraea
from equipoise.round import start


class Balance(NamedTuple):
    """Mean divergences (KLD) from the uniform class mix, and how many samples were added for each that there was."""

    clients: float  # as they are
    resampled: float  # all of them, after resampling
    mediators: float  # of the first rounds
    storage: float


def balance(fed: Federation, method: Astraea, rounds: int = 1) -> Balance:
    chain, engine = Chain(method), Stacked(fed)
    slots = start(fed, chain, engine).slots
    numbers, counts = slots["astraea"]["numbers"], slots["astraea"]["counts"].cpu()
    plans = (chain.plan(chain.select(slots, fed, number)[None, :], slots, fed) for number in range(rounds))
    divergences = [float(mediators.kld(mediators.pooled(counts, plan)).mean()) for plan in plans]
    clients, resampled, storage = (float(numbers[name]) for name in ("kld_clients", "kld_resampled", "storage"))
    return Balance(clients, resampled, sum(divergences) / rounds, storage)


def measured(config: Config) -> dict[str, float]:
    """The balance of a config's federation; mediators of one client are the clients themselves, all of them."""
    chain = runs.parse_method(config.method).methods
    if len(chain) != 1 or not isinstance(chain[0], Astraea):
        raise ConfigError(f"method {config.method!r}: expected astraea alone, as nothing is trained")
    found = balance(runs.federate(config), chain[0], config.train.rounds)
    kld = found.resampled if chain[0].gamma == 1 else found.mediators
    return {"kld": kld, "storage": found.storage, "kld_clients": found.clients}

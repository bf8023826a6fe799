"""Measures how balanced clients and mediators are under Astraea, before anything is trained."""

from __future__ import annotations

from typing import NamedTuple

from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.round import start
from equipoise.engines import stacked_engine
from equipoise.methods import Astraea
from equipoise.methods.registry import parse
from equipoise.methods.shared import mediators
from equipoise.runs.config import Config
from equipoise.runs.federate import federate


class Balance(NamedTuple):
    """Mean divergences (KLD) from the uniform class mix, and the storage that augmented samples need."""

    clients: float  # mean over all clients, before resampling
    resampled: float  # mean over all clients, after resampling
    mediators: float  # mean over the mediators of the first rounds
    storage: float  # augmented samples, as a share of the samples before


def balance(fed: Federation, method: Astraea, rounds: int = 1) -> Balance:
    """Measure the balance of a federation under Astraea; the mediators are those of the first `rounds` rounds."""
    chain, engine = Chain(method), stacked_engine()(fed)
    slots = start(fed, chain, engine).slots
    numbers, counts = slots["astraea"]["numbers"], slots["astraea"]["counts"].cpu()
    view = fed.server_view
    plans = (chain.plan(chain.select(slots, view, number)[None, :], slots, view) for number in range(rounds))
    divergences = [float(mediators.kld(mediators.pooled(counts, plan)).mean()) for plan in plans]
    clients, resampled, storage = (float(numbers[name]) for name in ("kld_clients", "kld_resampled", "storage"))
    return Balance(clients, resampled, sum(divergences) / rounds, storage)


def measured(config: Config) -> dict[str, float]:
    """Measure the balance of a config's federation.

    If a mediator has one client only (gamma = 1), `kld` is the mean over all clients, not over those of the rounds.
    """
    chain = parse(config.method).methods
    if len(chain) != 1 or not isinstance(chain[0], Astraea):
        raise ConfigError(f"method {config.method!r}: expected astraea alone, as nothing is trained")
    found = balance(federate(config), chain[0], config.train.rounds)
    kld = found.resampled if chain[0].gamma == 1 else found.mediators
    return {"kld": kld, "storage": found.storage, "kld_clients": found.clients}

"""The model that the stacked engine trains on the samples of all sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from equipoise import Stacked
from equipoise.core.federation import Federation
from equipoise.core.round import one_round, start
from equipoise.core.tree import Tree
from equipoise.deploy import server
from equipoise.deploy.agreement import Agreement
from equipoise.deploy.site import Site
from equipoise.methods.registry import parse
from equipoise.runs.config import Config


def gathered(config: Config, agreement: Agreement, sites: Sequence[Site]) -> Federation:
    """A federation with the training samples of all sites in one place, which a real run never has."""
    parts = [site._parts(agreement)[:2] for site in sites]
    y = np.concatenate([y for _, y in parts])
    return replace(
        server._federation(config, agreement),
        x=torch.from_numpy(np.concatenate([x for x, _ in parts])),
        y=torch.from_numpy(y),
        indices=torch.arange(len(y)),
        offsets=torch.tensor([0, *(len(y) for _, y in parts)]).cumsum(0),
    )


def simulated(config: Config, agreement: Agreement, sites: Sequence[Site]) -> Tree:
    """The model after all rounds on the stacked engine."""
    fed = gathered(config, agreement, sites)
    engine, chain = Stacked(fed, precision="float64"), parse(agreement.method)
    state = start(fed, chain, engine)
    for _ in range(config.train.rounds):
        state, _ = one_round(state, fed, chain, engine)
    return {**state.params, **state.buffers}

"""Measures the error of FedRE's estimate of the class shares; the true shares are known only in a simulation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.questions import ClassCounts
from equipoise.core.round import start
from equipoise.core.turn import Turn
from equipoise.engines import stacked_engine
from equipoise.methods.shared.estimation import PRELUDE, probe, shares


class Estimate(NamedTuple):
    """Estimated and true class shares."""

    shares: Tensor  # estimated for all clients together
    truth: Tensor
    clients: Tensor  # estimated for each client that has samples, one row per client
    clients_truth: Tensor

    @property
    def error(self) -> Tensor:
        """The error of the estimate for each class, as a fraction of its true share."""
        return (self.shares - self.truth).abs() / self.truth


@torch.no_grad()
def estimate(fed: Federation, local: Local = PRELUDE, engine: Engine | None = None) -> Estimate:
    """Estimate the class shares as FedRE does before its first round; the global model is not trained."""
    engine = engine or stacked_engine()(fed)
    fed.auxiliary_for("the estimate of class shares")
    state = start(fed, Chain(), engine)
    turn = Turn.begin(fed, engine, state)
    answers = probe(turn, local)
    counts = turn.ask(ClassCounts(len(fed.classes)), rows=True)["counts"].to(engine.dtype)
    return Estimate(
        shares(answers.pooled()),
        counts.sum(0) / counts.sum(),
        shares(answers.outputs),
        counts / counts.sum(-1, keepdim=True),
    )

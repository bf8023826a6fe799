"""The cost of Astraea's chains of clients and augmented samples compared with FedAvg (Duan et al., Section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.federation import Federation
from equipoise.core.round import start
from equipoise.engines import stacked_engine
from equipoise.methods.astraea import Astraea


def traffic(model_bytes: int, clients: int, gamma: int, mediator_epochs: int = 1) -> int:
    """Return the bytes that are sent in a round: 2 |w| (ceil(c / gamma) + c E_m).

    A mediator exchanges the model with the server once, and with each of its clients once in every mediator epoch.
    The paper prints the formula without E_m, that is for E_m = 1. Without mediators the traffic is 2 |w| c.

    >>> traffic(model_bytes=1000, clients=50, gamma=10)
    110000
    """
    return 2 * model_bytes * (-(-clients // gamma) + clients * mediator_epochs)


def seconds(
    plan: Tensor, sizes: Tensor, epochs: int, model_bytes: int, *, per_sample: float, bandwidth: float
) -> float:
    """Return how many seconds a round takes on a simulated clock.

    `plan` holds client numbers as [waves, lanes] (-1: no client), and `sizes` the number of samples of each client. A
    visit takes epochs x samples x `per_sample` seconds, plus the transfer of the model in both directions at
    `bandwidth` bytes per second. The visits of a lane follow one another, the lanes run in parallel, and the round
    ends with the slowest lane. If there are mediators, their exchange with the server is added.

    >>> seconds(torch.tensor([[0, 1], [2, -1]]), torch.tensor([10, 30, 10]), 1, 0, per_sample=0.1, bandwidth=1.0)
    3.0
    """
    exchange = 2 * model_bytes / bandwidth
    visit = epochs * sizes[plan.clamp(min=0)].double() * per_sample + exchange
    lanes = torch.where(plan >= 0, visit, 0).sum(0)
    return float(lanes.max()) + (exchange if len(plan) > 1 else 0.0)


@dataclass(frozen=True)
class Overhead:
    """The cost of Astraea and of FedAvg with the same clients; traffic and round seconds are those of one round."""

    storage: float  # augmented samples, as a share of the samples before
    storage_bytes: int
    storage_bytes_per_client: float
    augmenting_seconds: float  # spent once, at the client with the most augmented samples
    traffic_bytes: int
    round_seconds: float
    fedavg_traffic_bytes: int
    fedavg_round_seconds: float


def overhead(
    fed: Federation, method: Astraea, *, per_sample: float, bandwidth: float, per_copy: float = 0.0, round: int = 0
) -> Overhead:
    """Compute storage, traffic and time of Astraea in a federation, without training.

    `per_sample` is the time in seconds in which a client trains on one sample once, `bandwidth` the bytes per second
    between any two parties, `per_copy` the time to make one augmented sample. The cohort is that of the given round.
    """
    engine, chain = stacked_engine()(fed), Chain(method)
    clients = torch.arange(fed.clients)
    before = engine.sizes(clients)
    state = start(fed, chain, engine)
    after = engine.sizes(clients)
    assert engine.copies is not None
    owner = torch.arange(fed.clients).repeat_interleave(after)
    copies = torch.bincount(owner[engine.copies.cpu() > 0], minlength=fed.clients)
    cohort = chain.select(state.slots, fed.server_view, round)[None, :]
    plan = chain.plan(cohort, state.slots, fed.server_view)
    model, sample = tree.nbytes(state.params) + tree.nbytes(state.buffers), fed.x[0].nbytes
    pace = {"per_sample": per_sample, "bandwidth": bandwidth}
    direct = 2 * model * cohort.numel()
    chained = traffic(model, cohort.numel(), method.gamma, method.mediator_epochs)
    return Overhead(
        storage=int(copies.sum()) / int(before.sum()),
        storage_bytes=int(copies.sum()) * sample,
        storage_bytes_per_client=int(copies.sum()) * sample / len(fed.eligible),
        augmenting_seconds=int(copies.max()) * per_copy,
        traffic_bytes=chained if len(plan) > 1 else direct,
        round_seconds=seconds(plan, after, chain.local(fed.local).epochs, model, **pace),
        fedavg_traffic_bytes=direct,
        fedavg_round_seconds=seconds(cohort, before, fed.local.epochs, model, **pace),
    )

"""What chains of clients and augmented copies cost beside FedAvg (Duan et al., Astraea, Section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise import tree
from equipoise.engines import Stacked
from equipoise.federation import Federation
from equipoise.method import Chain
from equipoise.methods.astraea import Astraea
from equipoise.round import start


def traffic(model_bytes: int, clients: int, gamma: int, mediator_epochs: int = 1) -> int:
    """Bytes that move in a round: 2 |w| (ceil(c / gamma) + c E_m).

    A mediator exchanges the model with the server once, and with each of its clients once in every mediator epoch;
    the paper prints the formula without E_m, that is for E_m = 1. Without mediators it is 2 |w| c.

    >>> traffic(model_bytes=1000, clients=50, gamma=10)
    110000
    """
    return 2 * model_bytes * (-(-clients // gamma) + clients * mediator_epochs)


def seconds(
    plan: Tensor, sizes: Tensor, epochs: int, model_bytes: int, *, per_sample: float, bandwidth: float
) -> float:
    """How long a round lasts on a simulated clock.

    `plan` is [waves, lanes] of client numbers (-1: nobody), `sizes` the samples of each client. A visit takes
    epochs x samples x `per_sample`, and the model going there and back at `bandwidth` bytes per second. The visits of
    a lane follow one another, lanes run side by side, and the slowest is waited for; where there are mediators, the
    exchange between them and the server comes on top.

    >>> seconds(torch.tensor([[0, 1], [2, -1]]), torch.tensor([10, 30, 10]), 1, 0, per_sample=0.1, bandwidth=1.0)
    3.0
    """
    exchange = 2 * model_bytes / bandwidth
    visit = epochs * sizes[plan.clamp(min=0)].double() * per_sample + exchange
    lanes = torch.where(plan >= 0, visit, 0).sum(0)
    return float(lanes.max()) + (exchange if len(plan) > 1 else 0.0)


@dataclass(frozen=True)
class Overhead:
    """Of a run and, for comparison, of FedAvg with the same clients; bytes and seconds are those of one round."""

    storage: float  # augmented samples, as a share of the samples there were
    storage_bytes: int
    storage_bytes_per_client: float
    augmenting_seconds: float  # once, at the client with the most copies
    traffic_bytes: int
    round_seconds: float
    fedavg_traffic_bytes: int
    fedavg_round_seconds: float


def overhead(
    fed: Federation, method: Astraea, *, per_sample: float, bandwidth: float, per_copy: float = 0.0, round: int = 0
) -> Overhead:
    """Storage, traffic and time of Astraea in a federation, without training.

    `per_sample`: seconds a client takes to train on one sample once; `bandwidth`: bytes per second between any two
    parties; `per_copy`: seconds to make one augmented sample. The cohort is the one of the given round.
    """
    engine, chain = Stacked(fed), Chain(method)
    clients = torch.arange(fed.clients)
    before = engine.sizes(clients)
    state = start(fed, chain, engine)
    after = engine.sizes(clients)
    assert engine.copies is not None
    owner = torch.arange(fed.clients).repeat_interleave(after)
    copies = torch.bincount(owner[engine.copies.cpu() > 0], minlength=fed.clients)
    cohort = chain.select(state.slots, fed, round)[None, :]
    plan = chain.plan(cohort, state.slots, fed)
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

"""A federated round as a flow of values. An empty chain of methods is FedAvg."""

from __future__ import annotations

import torch

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.federation import Federation
from equipoise.core.sums import Sums
from equipoise.core.turn import State, Turn


@torch.no_grad()
def start(fed: Federation, chain: Chain, engine: Engine) -> State:
    chain.check(fed.server_view, chain)
    params, buffers = engine.place(fed.network.params), engine.place(fed.network.buffers)
    engine.open(chain, params)
    blank = State(0, params, buffers, {})
    return blank._replace(slots=chain.init(Turn.begin(fed, engine, blank, chain)))


@torch.no_grad()
def reopen(state: State, fed: Federation, chain: Chain, engine: Engine) -> None:
    """Make an engine ready to go on from a state; what the clients keep is the caller's to restore."""
    chain.check(fed.server_view, chain)
    engine.open(chain, state.params)
    for method in chain.having("resample"):
        engine.resample(method, state.slots[method.name])


@torch.no_grad()
def one_round(state: State, fed: Federation, chain: Chain, engine: Engine) -> tuple[State, Sums]:
    # 1. Who trains, and who after whom.
    ids = chain.select(state.slots, fed.server_view, state.round)
    plan = chain.plan(ids[None, :], state.slots, fed.server_view)
    # 2. The clients train; the server sees sums.
    turn = Turn.begin(fed, engine, state, chain, plan)
    sums = engine.train(state, plan, chain, chain.local(fed.local), turn)
    # 3. The model moves by the weighted mean of the deltas, as changed by the methods.
    mean = tree.scale(sums.delta, torch.where(sums.weight == 0, 0, 1 / sums.weight))
    update, slots = chain.update(mean, sums, state.slots)
    after, buffers = tree.add(state.params, update), sums.mean_buffers(state.buffers)
    # 4. The methods learn from what happened.
    slots = chain.close(slots, turn._replace(params=after, buffers=buffers, sums=sums))
    return State(state.round + 1, after, buffers, slots), sums

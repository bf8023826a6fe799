"""A federated round as a flow of values. An empty chain of methods is FedAvg."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise import tree
from equipoise.engines import Engine, Sums
from equipoise.federation import Federation
from equipoise.local import Local
from equipoise.method import Chain, Method
from equipoise.questions import Question
from equipoise.tree import Tree


class State(NamedTuple):
    """All that the server remembers between rounds."""

    round: int
    params: Tree
    buffers: Tree
    slots: Tree  # by method


class Turn(NamedTuple):
    """What a method's server half may look at: the federation, the round's sums, the model before and after."""

    fed: Federation
    engine: Engine
    state: State
    after: Tree
    buffers: Tree
    sums: Sums | None = None
    owner: str = ""
    chain: Chain = Chain()  # all methods of the run
    plan: Tensor | None = None  # who trained in this round, and who after whom

    def of(self, name: str) -> Turn:
        return self._replace(owner=name, sums=self.sums and self.sums.of(name))

    def ask(self, question: Question, rows: bool = False, **options: Any) -> Tree:
        """The sum of all clients' answers about the model as it is now; `rows=True` only with `reveals`."""
        if rows:
            self.chain.may_look(self.owner)
        return self.engine.ask(question, self.after, self.buffers, owner=self.owner, rows=rows, **options)

    def train(self, method: Method, local: Local, round: int = -1) -> Sums:  # whose draws are no other round's
        """All clients train once beside the run, from the model as it is now, which does not move."""
        state = State(round, self.after, self.buffers, {method.name: {}})
        plan = self.engine.fed.eligible[None, :]
        return self.engine.train(state, plan, Chain(method), local, self).of(method.name)


@torch.no_grad()
def start(fed: Federation, chain: Chain, engine: Engine) -> State:
    chain.check(fed, chain)
    params, buffers = engine.place(fed.network.params), engine.place(fed.network.buffers)
    engine.open(chain, params)
    blank = State(0, params, buffers, {})
    return blank._replace(slots=chain.init(Turn(fed, engine, blank, params, buffers, chain=chain)))


@torch.no_grad()
def one_round(state: State, fed: Federation, chain: Chain, engine: Engine) -> tuple[State, Sums]:
    # 1. Who trains, and who after whom.
    ids = chain.select(state.slots, fed, state.round)
    plan = chain.plan(ids[None, :], state.slots, fed)
    # 2. The clients train; the server sees sums.
    turn = Turn(fed, engine, state, state.params, state.buffers, chain=chain, plan=plan)
    sums = engine.train(state, plan, chain, chain.local(fed.local), turn)
    # 3. The model moves by the weighted mean of the deltas, as changed by the methods.
    mean = tree.scale(sums.delta, torch.where(sums.weight == 0, 0, 1 / sums.weight))
    update, slots = chain.update(mean, sums, state.slots)
    after, buffers = tree.add(state.params, update), sums.mean_buffers(state.buffers)
    # 4. The methods learn from what happened.
    slots = chain.close(slots, turn._replace(after=after, buffers=buffers, sums=sums))
    return State(state.round + 1, after, buffers, slots), sums

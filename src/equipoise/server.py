"""What the server remembers, and what a method's server half may look at and ask for."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

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

    def train(self, method: Method, local: Local, round: int = -1) -> Sums:
        """All clients train once beside the run (round -1: with draws of its own); the model does not move."""
        state = State(round, self.after, self.buffers, {method.name: {}})
        plan = self.engine.fed.eligible[None, :]
        return self.engine.train(state, plan, Chain(method), local, self).of(method.name)

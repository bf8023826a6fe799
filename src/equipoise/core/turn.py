"""What the server remembers between rounds, and what a method's server half may look at and ask for."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.questions import Question
from equipoise.core.server_view import ServerEngine, ServerView, whole
from equipoise.core.sums import Sums
from equipoise.core.tree import Tree


class State(NamedTuple):
    """All that the server remembers between rounds."""

    round: int
    params: Tree
    buffers: Tree
    slots: Tree  # by method


class Turn(NamedTuple):
    """What a method's server half may look at, at one moment of a round.

    `params` and `buffers` are the global model at that moment: in `init` the initial one, in `rows` the one that the
    round began with, in `close` the new one. `state` is always what the round began with. `fed` and `engine` are
    views: they have what a server has.
    """

    fed: ServerView
    engine: ServerEngine
    state: State
    params: Tree
    buffers: Tree
    sums: Sums | None = None
    owner: str = ""  # the name of the method whose turn it is
    chain: Chain = Chain()  # all methods of the run
    plan: Tensor | None = None  # who trained in this round, and who after whom

    @classmethod
    def begin(
        cls, fed: Federation, engine: Engine, state: State, chain: Chain = Chain(), plan: Tensor | None = None
    ) -> Turn:
        """The turn that a round begins with."""
        view = ServerEngine(engine)
        return cls(fed.server_view, view, state, state.params, state.buffers, chain=chain, plan=plan)

    def of(self, name: str) -> Turn:
        """The same turn as the named method sees it."""
        return self._replace(owner=name, sums=self.sums and self.sums.of(name))

    def ask(self, question: Question, rows: bool = False, **options: Any) -> Tree:
        """The sum of all clients' answers about the global model; `rows=True` only with `reveals`."""
        if rows:
            self.chain.may_look(self.owner)
        return whole(self.engine).ask(question, self.params, self.buffers, owner=self.owner, rows=rows, **options)

    def train(self, method: Method, local: Local, round: int = -1) -> Sums:
        """All clients train once beside the run (round -1 has draws of its own); the global model does not move."""
        state = State(round, self.params, self.buffers, {method.name: {}})
        engine = whole(self.engine)
        plan = engine.fed.eligible[None, :]
        return engine.train(state, plan, Chain(method), local, self).of(method.name)

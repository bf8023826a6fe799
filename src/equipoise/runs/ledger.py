"""Lists what clients and server exchange under a method, observed in real rounds rather than described by hand.

A tiny federation runs the method, and every tree that is sent or kept is listed with its size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise import data, models
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.questions import Question
from equipoise.core.round import one_round, start
from equipoise.core.sums import Sums
from equipoise.core.tree import Tree
from equipoise.core.turn import State, Turn
from equipoise.data import IID
from equipoise.engines.stacked import Stacked


class Entry(NamedTuple):
    direction: str  # receives | sends | keeps | reveals
    what: str
    size: str
    meaning: str


class _Recorder(Stacked):
    """An engine that records the questions to clients, what was sent with them, and the answers."""

    def __init__(self, fed: Federation, **options: Any) -> None:
        super().__init__(fed, **options)
        self.asked: dict[tuple[str, str, bool], Tree] = {}
        self.sent: dict[str, Tree] = {}
        self.preludes: dict[str, Chain] = {}

    def train(self, state: State, plan: Tensor, chain: Chain, local: Local, turn: Turn) -> Sums:
        if state.round < 0:
            self.preludes[turn.owner] = chain
        return super().train(state, plan, chain, local, turn)

    def ask(self, question: Question, params: Tree, buffers: Tree, *, owner: str = "", **options: Any) -> Tree:
        answer = super().ask(question, params, buffers, owner=owner, **options)
        rows = bool(options.get("rows", False))
        self.asked[owner, type(question).__name__, rows] = tree.rows(answer, 0) if rows else answer
        self.sent[owner] = {**self.sent.get(owner, {}), **(options.get("msg") or {})}
        return answer


def ledger(method: Method, fed: Federation | None = None) -> list[Entry]:
    """Return an entry for each tree that a client receives, sends or keeps, or that the server sees of one client.

    The entries are observed in `fed`, or by default in a small federation of handwritten digits.
    """
    chain, fed = Chain(method), fed or _example()
    engine = _Recorder(fed)
    state = start(fed, chain, engine)
    # A method with a setting `every` asks some of its questions only in every such round.
    for _ in range(max((getattr(m, "every", 1) for m in chain), default=1)):
        state, sums = one_round(state, fed, chain, engine)
    size = _Sizes(state.params, len(fed.classes))
    entries = [Entry("receives", "the model", "model", "parameters, and buffers where the model has any")]
    for m in chain:
        slot = state.slots[m.name]
        sent = {**m.broadcast(slot), **tree.rows(m.address(slot, torch.arange(1)), 0), **engine.sent.get(m.name, {})}
        entries += [Entry("receives", f"{m.name}: {k}", size.of(v), m.words.get(k, "")) for k, v in sent.items()]
    weighted = "weight x (its model - the model it received); the server sees the cohort's sum"
    entries.append(Entry("sends", "its change of the model", "model", weighted))
    entries.append(Entry("sends", "its weight", "1 number", "number of samples, or 1; summed"))
    for m in chain:
        upload = sums.uploads[m.name]
        entries += [Entry("sends", f"{m.name}: {k}", size.of(v), _summed(m, k)) for k, v in upload.items()]
    for owner, prelude in engine.preludes.items():
        trained = "trained before round 1: " + " and ".join(m.about for m in prelude)
        entries.append(Entry("sends", f"{owner}: a model of its own, once", "model", trained))
    for (owner, question, rows), answer in engine.asked.items():
        who = next((m for m in chain if m.name == owner), chain)
        for k, v in answer.items():
            meaning = who.words.get(k, "") or f"answer to {question}"
            entries.append(Entry("sends", f"{owner}: {k}", size.of(v), meaning + ("" if rows else "; summed")))
    own = (
        "at the end, how well it does with the model on samples that it holds out: accuracy, its square and 1; summed"
    )
    entries.append(Entry("sends", "its own accuracy", "3 numbers", own))
    for m in chain:
        kept = m.remember(state.params, len(fed.classes))
        entries += [Entry("keeps", f"{m.name}: {k}", size.of(v), m.words.get(k, "")) for k, v in kept.items()]
        if m in chain.having("resample"):
            entries.append(Entry("keeps", f"{m.name}: its samples", "", "which it trains on, and augmented copies"))
    revealed = [
        Entry("reveals", f"{m.name}: {what}", "", "of each client alone") for m in chain for what in m.reveals
    ]
    entries += revealed or [Entry("reveals", "nothing", "", "the server needs sums over the cohort only")]
    return entries


def _example() -> Federation:
    pool = data.load("digits")
    return data.federate(
        pool,
        lambda: models.build("mlp", pool.x.shape[1:], 10, hidden=[8]),
        IID(clients=4),
        local=Local(batch=64),
        auxiliary=8,
    )


def _summed(method: Method, name: str) -> str:
    return f"{method.words.get(name, '')}; summed".lstrip("; ")


class _Sizes:
    """Describes a size relative to the model or the classes, since the numbers of the tiny example mean nothing."""

    def __init__(self, params: Tree, classes: int) -> None:
        self.model, self.classes = tree.count(params), classes

    def of(self, value: Tree | Tensor) -> str:
        numbers = tree.count(value) if isinstance(value, dict) else value.numel()
        if numbers and numbers % self.model == 0:
            return "model" if numbers == self.model else f"{numbers // self.model} x model"
        if numbers == self.classes:
            return "1 number per class"
        return f"{numbers} number{'s' if numbers != 1 else ''}"

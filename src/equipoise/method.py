"""A method is a frozen dataclass whose fields are its settings and whose methods are taps.

A federated round is a flow of values; a tap is a point of it where a method may change a value. Every tap defaults
to "leave it as it is", so that an empty chain of methods is FedAvg. A method sees only its own `slot` (what the
server remembers for it), `msg` (what it sends to a client) and `memory` (what it keeps at a client). Values pass the
methods in the order written, at every tap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from equipoise.errors import ConfigError
from equipoise.local import Data, Env, Local, log_likelihood
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.engines import Sums
    from equipoise.federation import Federation
    from equipoise.server import Turn


@dataclass(frozen=True)
class Method:
    name: ClassVar[str] = ""
    about: ClassVar[str] = ""  # one line: the paper and the idea
    reveals: ClassVar[frozenset[str]] = frozenset()  # what the server learns of a single client, beyond sums
    single_visits: ClassVar[bool] = False  # refuses lanes: it is only defined from the global model
    needs_data: ClassVar[bool] = False  # its `begin` or `finish` reads all local data, which costs a pass over it
    words: ClassVar[dict[str, str]] = {}  # what the leaves of slot, msg, memory and upload mean, for the ledger

    # -- once, at the server -----------------------------------------------------------------------------------------
    def check(self, fed: Federation, chain: Chain) -> None:
        """Refuse, with the reason, a federation or a chain in which this method has no meaning."""

    def local(self, settings: Local) -> Local:
        """The settings of local training."""
        return settings

    def init(self, turn: Turn) -> Tree:
        """The slot before the first round; may ask the clients, have them train, or have them resample their data."""
        return {}

    # -- once, at each client ----------------------------------------------------------------------------------------
    def remember(self, params: Tree, classes: int) -> Tree:
        """The memory of a client that was never seen: the same for all of them."""
        return {}

    def resample(self, y: Tensor, msg: Tree, key: Tensor) -> tuple[Tensor, Tensor]:
        """Which of a client's samples it trains on: positions, and for each 0 (the sample itself) or a number above 0
        that names an augmented copy; the number reaches `batch` as `env.copies`."""
        return torch.arange(len(y)), torch.zeros_like(y)

    # -- every round, at the server ----------------------------------------------------------------------------------
    def select(self, slot: Tree, fed: Federation, round: int) -> Tensor:
        """The clients of this round. At most one method of a chain replaces the uniform draw."""
        return fed.draw(round)

    def plan(self, lanes: Tensor, slot: Tree, fed: Federation) -> Tensor:
        """Who trains after whom: [waves, lanes] of client numbers, -1 for nobody."""
        return lanes

    def broadcast(self, slot: Tree) -> Tree:
        """What every client of the round is sent."""
        return {}

    def address(self, slot: Tree, ids: Tensor) -> Tree:
        """What each client is sent alone: one row per client in every leaf."""
        return {}

    # -- every visit, at one client: traced, never with a client axis ------------------------------------------------
    def weight(self, weight: Tensor, env: Env) -> Tensor:
        """The weight of the client's delta in the average."""
        return weight

    def begin(self, env: Env, data: Data | None) -> Tree:
        """A note taken before training, from all local data."""
        return {}

    def batch(self, x: Tensor, y: Tensor, env: Env) -> tuple[Tensor, Tensor]:
        return x, y

    def logits(self, logits: Tensor, env: Env) -> Tensor:
        return logits

    def loss(self, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        """One loss per sample. At most one method of a chain replaces the cross entropy."""
        return -log_likelihood(logits, y)

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        return losses

    def grads(self, grads: Tree, env: Env) -> Tree:
        """The gradient of a batch; clipping comes after all methods."""
        return grads

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        """After training, from the raw delta: what to upload (it will be summed), and the new memory."""
        return {}, env.memory

    def delta(self, delta: Tree, env: Env) -> Tree:
        return delta

    # -- every round, at the server again ----------------------------------------------------------------------------
    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        """What the server computes from one client's tapped delta and upload as they arrive; kept in `sums.rows`.
        `turn.after` is the global model the round began with, `turn.buffers` are the client's own."""
        return {}

    def update(self, update: Tree, sums: Sums, slot: Tree) -> tuple[Tree, Tree]:
        """What is added to the global model, and the new slot."""
        return update, slot

    def close(self, slot: Tree, turn: Turn) -> Tree:
        """The slot after the round; may ask the clients about the new model."""
        return slot

    def metrics(self, slot: Tree) -> dict[str, float]:
        """Numbers of this method worth a line in the log of the run."""
        return {}

    def observe(self, slot: Tree, memory: Tree) -> dict[str, float]:
        """More of them, which only a simulation can know: from the memories of all clients seen, one row for each."""
        return {}

    # -- a method is its configuration -------------------------------------------------------------------------------
    def __add__(self, other: Method) -> Chain:
        return Chain(self, other)

    def __str__(self) -> str:
        """The expression that a configuration file would hold; only settings that differ from their defaults."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (f"({', '.join(f'{k}={v!r}' for k, v in given)})" if given else "")


@dataclass(frozen=True)
class FedAvg(Method):
    """The neutral element of chains: averaging and nothing else (McMahan et al., 2017)."""

    name = "fedavg"
    about = "average the clients' models (McMahan et al., 2017)"


@dataclass(frozen=True, init=False)
class Chain(Method):
    """Several methods as one. Slots, messages, memories, notes and uploads are dicts keyed by method."""

    methods: tuple[Method, ...]

    def __init__(self, *methods: Method) -> None:
        flat = [p for m in methods for p in (m.methods if isinstance(m, Chain) else (m,)) if type(p) is not FedAvg]
        names = [m.name for m in flat]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"method: {name} stands {names.count(name)} times in the chain, expected once")
        object.__setattr__(self, "methods", tuple(flat))
        for tap, what in {"select": "the selection of clients", "loss": "the loss"}.items():
            if len(several := self.having(tap)) > 1:
                both = " and ".join(m.name for m in several)
                raise ConfigError(f"method: {both} each replace {what}; keep one of them")
        for method in self.having("rows"):
            self.may_look(method.name)

    def may_look(self, name: str) -> None:
        """Refuse the named method if it looks at single clients and does not say so."""
        if any(m.name == name and not m.reveals for m in self.methods):
            raise ConfigError(f"method: {name} looks at single clients, not at sums, and must say so in `reveals`")

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.methods))})"

    def __str__(self) -> str:
        return " + ".join(str(m) for m in self.methods) or "fedavg"

    def __iter__(self) -> Iterator[Method]:
        return iter(self.methods)

    def having(self, tap: str) -> list[Method]:
        """The methods that change the given tap."""
        return [m for m in self.methods if getattr(type(m), tap) is not getattr(Method, tap)]

    def check(self, fed: Federation, chain: Chain) -> None:
        for m in self.methods:
            m.check(fed, chain)

    def local(self, settings: Local) -> Local:
        return _settings(self.methods, settings)

    def init(self, turn: Turn) -> Tree:
        slots: Tree = {}
        # Whoever changes the clients' data goes first, so that the others ask about the data that will be trained on.
        resampling = self.having("resample")
        for m in sorted(self.methods, key=lambda m: m not in resampling):
            slots[m.name] = m.init(turn.of(m.name))
        return {m.name: slots[m.name] for m in self.methods}

    def remember(self, params: Tree, classes: int) -> Tree:
        return {m.name: m.remember(params, classes) for m in self.methods}

    def select(self, slot: Tree, fed: Federation, round: int) -> Tensor:
        for m in self.having("select"):
            return m.select(slot[m.name], fed, round)
        return fed.draw(round)

    def plan(self, lanes: Tensor, slot: Tree, fed: Federation) -> Tensor:
        for m in self.methods:
            lanes = m.plan(lanes, slot[m.name], fed)
        for m in self.methods:
            if m.single_visits and len(lanes) > 1:
                raise ConfigError(
                    f"method: {m.name} is defined from the global model only and cannot train clients one after"
                    f" another in lanes of {len(lanes)}; leave out {m.name}, or the method that makes the lanes"
                )
        return lanes

    def broadcast(self, slot: Tree) -> Tree:
        return {m.name: m.broadcast(slot[m.name]) for m in self.methods}

    def address(self, slot: Tree, ids: Tensor) -> Tree:
        return {m.name: m.address(slot[m.name], ids) for m in self.methods}

    def weight(self, weight: Tensor, env: Env) -> Tensor:
        for m, own in self._own(env, "weight"):
            weight = m.weight(weight, own)
        return weight

    def begin(self, env: Env, data: Data | None) -> Tree:
        return {m.name: {} for m in self.methods} | {m.name: m.begin(own, data) for m, own in self._own(env, "begin")}

    def batch(self, x: Tensor, y: Tensor, env: Env) -> tuple[Tensor, Tensor]:
        for m, own in self._own(env, "batch"):
            x, y = m.batch(x, y, own)
        return x, y

    def logits(self, logits: Tensor, env: Env) -> Tensor:
        for m, own in self._own(env, "logits"):
            logits = m.logits(logits, own)
        return logits

    def loss(self, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        for m, own in self._own(env, "loss"):
            return m.loss(logits, y, own)
        return super().loss(logits, y, env)

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        for m, own in self._own(env, "losses"):
            losses = m.losses(losses, logits, y, own)
        return losses

    def grads(self, grads: Tree, env: Env) -> Tree:
        for m, own in self._own(env, "grads"):
            grads = m.grads(grads, own)
        return grads

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        uploads: Tree = {m.name: {} for m in self.methods}
        memory = dict(env.memory)
        for m, own in self._own(env, "finish"):
            uploads[m.name], memory[m.name] = m.finish(delta, own, data)
        return uploads, memory

    def delta(self, delta: Tree, env: Env) -> Tree:
        for m, own in self._own(env, "delta"):
            delta = m.delta(delta, own)
        return delta

    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        return {m.name: m.rows(delta, upload[m.name], turn.of(m.name)) for m in self.having("rows")}

    def update(self, update: Tree, sums: Sums, slot: Tree) -> tuple[Tree, Tree]:
        slot = dict(slot)
        for m in self.methods:
            update, slot[m.name] = m.update(update, sums.of(m.name), slot[m.name])
        return update, slot

    def close(self, slot: Tree, turn: Turn) -> Tree:
        return {m.name: m.close(slot[m.name], turn.of(m.name)) for m in self.methods}

    def metrics(self, slot: Tree) -> dict[str, float]:
        return {f"{m.name}.{k}": v for m in self.methods for k, v in m.metrics(slot[m.name]).items()}

    def observe(self, slot: Tree, memory: Tree) -> dict[str, float]:
        known = [m for m in self.having("observe") if m.name in memory]
        return {f"{m.name}.{k}": v for m in known for k, v in m.observe(slot[m.name], memory[m.name]).items()}

    def _own(self, env: Env, tap: str) -> Iterator[tuple[Method, Env]]:
        """Each method that changes the tap, with the part of the environment that is its own."""
        for m in self.having(tap):
            name = m.name
            own = env._replace(
                msg=env.msg.get(name, {}), memory=env.memory.get(name, {}), note=env.note.get(name, {})
            )
            yield m, own


@lru_cache(maxsize=256)
def _settings(methods: tuple[Method, ...], settings: Local) -> Local:
    """The settings of local training after every method: asked for in every round, and always the same."""
    for m in methods:
        settings = m.local(settings)
    return settings


def chain(method: Method) -> Chain:
    """Any method as a chain."""
    return method if isinstance(method, Chain) else Chain(method)

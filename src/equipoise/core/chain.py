"""Several methods as one: a chain passes every value through its methods, in the order written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from equipoise.core.client import Data, Env
from equipoise.core.errors import ConfigError
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method, reference
from equipoise.core.tree import Tree

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.sums import Sums
    from equipoise.core.turn import Turn


@dataclass(frozen=True, init=False)
class Chain(Method, abstract=True):
    """Slots, messages, memories, notes and uploads of a chain are dicts keyed by the names of its methods."""

    methods: tuple[Method, ...]
    reads_features: ClassVar[bool]  # does a method read or change what the head of the model reads?

    def __init__(self, *methods: Method) -> None:
        flat = [p for m in methods for p in (m.methods if isinstance(m, Chain) else (m,)) if type(p) is not FedAvg]
        _check(flat)
        object.__setattr__(self, "methods", tuple(flat))
        for tap, what in {"select": "the selection of clients", "loss": "the loss"}.items():
            if len(several := self.having(tap)) > 1:
                both = " and ".join(m.name for m in several)
                raise ConfigError(f"method: {both} each replace {what}; keep one of them")
        for method in self.having("rows"):
            self.may_look(method.name)
        reads = any(m.needs_features for m in flat) or bool(self.having("features"))
        object.__setattr__(self, "reads_features", reads)  # looked up in every step: known beforehand

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

    def check(self, fed: ServerView, chain: Chain) -> None:
        for m in self.methods:
            if fed.network.head is None and (m.needs_features or m in self.having("features")):
                raise ConfigError(
                    f"method: {m.name} works on what the model's last linear layer reads, and this model's"
                    f" output is not that of a linear layer; expected a model that ends in one, or leave out {m.name}"
                )
            m.check(fed, chain)

    def local(self, settings: Local) -> Local:
        return _settings(self.methods, settings)

    def init(self, turn: Turn) -> Tree:
        slots: Tree = {}
        # A method that resamples goes first, so that the others ask about the samples that will be trained on.
        resampling = self.having("resample")
        for m in sorted(self.methods, key=lambda m: m not in resampling):
            slots[m.name] = m.init(turn.of(m.name))
        return {m.name: slots[m.name] for m in self.methods}

    def remember(self, params: Tree, classes: int) -> Tree:
        return {m.name: m.remember(params, classes) for m in self.methods}

    def select(self, slot: Tree, fed: ServerView, round: int) -> Tensor:
        for m in self.having("select"):
            return m.select(slot[m.name], fed, round)
        return fed.draw(round)

    def plan(self, lanes: Tensor, slot: Tree, fed: ServerView) -> Tensor:
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

    def features(self, features: Tensor, env: Env) -> Tensor:
        for m, own in self._own(env, "features"):
            features = m.features(features, own)
        return features

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

    def personal(self, logits: Tensor, env: Env) -> Tensor:
        for m, own in self._own(env, "personal"):
            logits = m.personal(logits, own)
        return logits

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


def _check(methods: list[Method]) -> None:
    """Refuse methods whose settings or names would confuse a chain."""
    known: dict[str, type[Method]] = {}
    for method in methods:
        kind = type(method)
        if "__dataclass_fields__" not in vars(kind):
            raise ConfigError(f"method: {reference(kind)} is no dataclass: expected @dataclass(frozen=True) above it")
        for field in fields(method):
            if field.name == "name":
                raise ConfigError(
                    f"method: {reference(kind)} has a setting 'name': expected name = {kind.name!r} without a type"
                )
            try:
                hash(getattr(method, field.name))
            except TypeError:
                raise ConfigError(
                    f"method: {method.name} has the setting {field.name} = {getattr(method, field.name)!r}, which"
                    " cannot be hashed; expected a number, a text or a tuple"
                ) from None
        other = known.setdefault(method.name, kind)
        if other is not kind:
            both = f"{reference(other)} and {reference(kind)}"
            raise ConfigError(f"method: {both} are both called {method.name!r}; give one of them another name")
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"method: {name} stands {names.count(name)} times in the chain, expected once")


@lru_cache(maxsize=256)
def _settings(methods: tuple[Method, ...], settings: Local) -> Local:
    """The settings of local training after every method: asked for in every round, and always the same."""
    for m in methods:
        settings = m.local(settings)
    return settings


def chain(method: Method) -> Chain:
    """Any method as a chain."""
    return method if isinstance(method, Chain) else Chain(method)

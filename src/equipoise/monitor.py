"""What each class does to the last layer, and what that tells of class counts: the monitor of Ratio-Loss.

Wang et al., "Addressing Class Imbalance in Federated Learning", AAAI 2021. The server trains one copy of the model on
each class p of its auxiliary set, as a client would. Delta_p is how that copy moved the last layer's weights, m_p the
mean of Delta_q over the other classes. S_p are the coordinates that class p moves most, and any other class less by
the factor `threshold`. They tell how many samples of a class a cohort has:

    n_p = mean over S_p of (a K G - n m_p) / (Delta_p - m_p)

with G the mean move by the K clients of the cohort, n their number of samples, and a the samples that a copy has seen
in an epoch. Estimates outside (0, 1.5 n / classes) are left out; where none is left, n_p = n / classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from equipoise import random
from equipoise.engines import Engine, Stacked, Sums
from equipoise.errors import ConfigError
from equipoise.federation import Federation
from equipoise.local import Local
from equipoise.method import Method
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.server import Turn


@dataclass(frozen=True)
class _Copy(Method):
    """Plain training, of which the moves of one layer are kept."""

    layer: str

    name = "copy"
    reveals = frozenset({"moves"})  # of the server's own samples

    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        return {"move": delta[self.layer].flatten(1)}


def last_layer(fed: Federation) -> str:
    """The name of the weights that give one output per class."""
    names = [name for name, leaf in fed.network.params.items() if leaf.dim() > 1]
    if not names or len(fed.network.params[names[-1]]) != len(fed.classes):
        raise ConfigError(
            "model: the server compares how classes move its last layer, expected a linear layer with one row of"
            f" weights for each of the {len(fed.classes)} classes"
        )
    return names[-1]


def moves(turn: Turn, local: Local) -> Tensor:
    """Delta[p, row, column]: how a copy of the model moves its last layer when it trains on class p alone."""
    if turn.engine not in _inside:
        place, precision, seat = str(turn.engine.device), turn.engine.precision, turn.engine.seat
        _inside[turn.engine] = Stacked(_classes_as_clients(turn), device=place, precision=precision, seat=seat)
    inside = turn._replace(engine=_inside[turn.engine])
    rows = inside.train(_Copy(last_layer(turn.fed)), local, turn.state.round).rows
    delta: Tensor = rows["values"]["move"]
    return delta[rows["ids"].argsort()]


_inside: WeakKeyDictionary[Engine, Stacked] = WeakKeyDictionary()  # made once, so that it finds its programs again


def _classes_as_clients(turn: Turn) -> Federation:
    """A federation inside the server, of one client per class, with draws that no real client has."""
    held = turn.fed.auxiliary_for(turn.owner)
    sizes = held.y.bincount()
    return replace(
        turn.fed,
        x=held.x,
        y=held.y,
        indices=held.y.argsort(stable=True),
        offsets=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
        roster=turn.fed.classes,
        seed=int(random.bits(turn.fed.seed, random.SERVER)),
    )


def of_others(delta: Tensor) -> Tensor:
    """m_p: the mean over the other classes."""
    return (delta.sum(0) - delta) / (len(delta) - 1)


def select(delta: Tensor, threshold: float) -> Tensor:
    """S_p[row, column]: whether class p has the largest move there, and every other class a far smaller one."""
    top, first = delta.max(0)
    mine = first == torch.arange(len(delta), device=delta.device)[:, None, None]
    rival = torch.where(mine, 0, delta.abs()).amax(0)
    return mine & (threshold * rival <= top.abs())


def class_counts(delta: Tensor, chosen: Tensor, sums: Sums, layer: str, seen: float) -> Tensor:
    """n_p: the cohort's samples of each class, from the sum of its clients' moves; `seen` is a."""
    others, even = of_others(delta), sums.samples / len(delta)
    total = sums.clients * sums.delta[layer].flatten(1) / sums.weight
    n = (seen * total - sums.samples * others) / (delta - others)
    kept = chosen & (n > 0) & (n < 1.5 * even)
    mean = torch.where(kept, n, 0).sum((1, 2)) / kept.sum((1, 2))
    return torch.where(kept.any(2).any(1), mean, even)


def seen_by_copy(fed: Federation, local: Local) -> float:
    """How many samples a client's steps of one epoch would have seen where a copy took as many."""
    size, steps = local.batches(torch.tensor(len(fed.auxiliary_for("the monitor")) // len(fed.classes)))
    return float(size * steps) / local.epochs

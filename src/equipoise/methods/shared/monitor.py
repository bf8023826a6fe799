"""The monitor of Ratio-Loss: how each class moves the last layer, and the class counts that follow from it.

Wang et al., "Addressing Class Imbalance in Federated Learning", AAAI 2021. The server trains one copy of the model on
each class p of its auxiliary set, as a client would. Delta_p is the change of that copy's last layer of weights, and
m_p the mean of Delta_q over the other classes. S_p are the coordinates that class p moves most, and more than any
other class by the factor `threshold`. From them follows how many samples of class p a cohort has:

    n_p = mean over S_p of (a K G - n m_p) / (Delta_p - m_p)

where G is the mean change by the K clients of the cohort, n their number of samples, and a the number of samples that
a copy saw in an epoch. Estimates outside (0, 1.5 n / classes) are left out; if none remains, n_p = n / classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.server_view import ServerEngine, ServerView
from equipoise.core.sums import Sums
from equipoise.core.tree import Tree

if TYPE_CHECKING:
    from equipoise.core.turn import Turn


@dataclass(frozen=True)
class _Copy(Method):
    """Plain training, after which the server keeps the changes of one layer."""

    layer: str

    name = "copy"
    reveals = frozenset({"moves"})  # only about the server's own samples

    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        return {"move": delta[self.layer].flatten(1)}


def last_layer(fed: ServerView) -> str:
    """Return the name of the weights that compute one output per class."""
    names = [name for name, leaf in fed.network.params.items() if leaf.dim() > 1]
    if not names or len(fed.network.params[names[-1]]) != len(fed.classes):
        raise ConfigError(
            "model: the server compares how classes move the last layer; expected a linear last layer with one row of"
            f" weights for each of the {len(fed.classes)} classes"
        )
    return names[-1]


def moves(turn: Turn, local: Local) -> Tensor:
    """Return Delta[p, row, column]: how the last layer of a copy of the model moves when trained on class p alone."""
    inside = turn._replace(engine=ServerEngine(turn.engine.inside(lambda: _classes_as_clients(turn))))
    rows = inside.train(_Copy(last_layer(turn.fed)), local, turn.state.round).rows
    delta: Tensor = rows["values"]["move"]
    return delta[rows["ids"].argsort()]


def _classes_as_clients(turn: Turn) -> Federation:
    """Build a federation within the server: one client per class."""
    held = turn.fed.auxiliary_for(turn.owner)
    return turn.fed.within(held, held.y, turn.fed.classes)


def mean_of_others(delta: Tensor) -> Tensor:
    """m_p: the mean of Delta_q over the other classes."""
    return (delta.sum(0) - delta) / (len(delta) - 1)


def select(delta: Tensor, threshold: float) -> Tensor:
    """Return the mask S_p[row, column]: where class p moves most, and every other class by far less."""
    top, first = delta.max(0)
    mine = first == torch.arange(len(delta), device=delta.device)[:, None, None]
    rival = torch.where(mine, 0, delta.abs()).amax(0)
    return mine & (threshold * rival <= top.abs())


def class_counts(delta: Tensor, chosen: Tensor, sums: Sums, layer: str, seen: float) -> Tensor:
    """Return n_p, the cohort's number of samples of each class, from the sum of its clients' deltas; `seen` is a."""
    others, even = mean_of_others(delta), sums.samples / len(delta)
    total = sums.clients * sums.delta[layer].flatten(1) / sums.weight
    n = (seen * total - sums.samples * others) / (delta - others)
    kept = chosen & (n > 0) & (n < 1.5 * even)
    mean = torch.where(kept, n, 0).sum((1, 2)) / kept.sum((1, 2))
    return torch.where(kept.any(2).any(1), mean, even)


def seen_by_copy(fed: ServerView, local: Local) -> float:
    """Return a: the number of steps that a copy takes in one epoch, times the batch size."""
    size, steps = local.batches(torch.tensor(len(fed.auxiliary_for("the monitor")) // len(fed.classes)))
    return float(size * steps) / local.epochs

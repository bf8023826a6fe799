"""The network of the task, for the peers that train with PyTorch."""

from __future__ import annotations

from itertools import pairwise

from baton import Task
from torch import nn


def mlp(task: Task) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(task.widths):
        layers += [nn.Linear(before, after), nn.LeakyReLU()]
    return nn.Sequential(*layers[:-1])

"""Functions that all reference loops share: plain PyTorch, one client after another, short last batches unpadded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from equipoise.core import random
from equipoise.core.federation import Federation
from equipoise.core.local import Local

State = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs of a batch, its labels) -> the loss to minimise
ClientLoss = Callable[[int], Loss]  # client -> its loss


class GivenDropout(nn.Module):
    """Dropout whose mask is drawn from a key that the loop sets before each batch."""

    def __init__(self, p: float, place: int, channels: bool) -> None:
        super().__init__()
        self.p, self.place, self.channels = p, place, channels
        self.key = torch.tensor(0)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = (*x.shape[:2], *([1] * (x.dim() - 2))) if self.channels else x.shape
        drop = random.chance(random.fold(self.key, self.place), int(torch.tensor(shape).prod()), self.p)
        return x * (~drop.view(shape)) / (1 - self.p)


def given_dropout(module: nn.Module) -> nn.Module:
    """The same model with every dropout replaced, numbered from 1 in order of appearance."""
    module, place = copy.deepcopy(module).double(), 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Dropout | nn.Dropout2d):
                place += 1
                setattr(parent, name, GivenDropout(child.p, place, isinstance(child, nn.Dropout2d)))
    return module


def client_rows(fed: Federation, client: int) -> Tensor:
    return fed.indices[int(fed.offsets[client]) : int(fed.offsets[client + 1])]


def batches(fed: Federation, client: int, round: int, local: Local, wave: int = 0) -> Iterator[Tensor]:
    rows = client_rows(fed, client)
    n = len(rows)
    key = random.bits(fed.seed, random.TRAIN, round, wave, client)
    if local.steps_per_epoch is not None:
        size = max(1, n // local.steps_per_epoch)
    else:
        size = n if local.batch == "full" else local.batch
    for epoch in range(local.epochs):
        order = random.order(random.fold(random.fold(key, random.ORDER), epoch), n)
        for low in range(0, n, size):
            yield rows[order[low : low + size]]


def optimiser(local: Local, module: nn.Module, round: int) -> torch.optim.Optimizer:
    lr, decay = local.rate(round), local.weight_decay
    if local.optimiser == "adam":
        return torch.optim.Adam(module.parameters(), lr=lr, betas=local.betas, eps=local.eps, weight_decay=decay)
    return torch.optim.SGD(
        module.parameters(), lr=lr, momentum=local.momentum, nesterov=local.nesterov, weight_decay=decay
    )


def flipped(image: Tensor, key: Tensor, place: int, most: int = 4) -> Tensor:
    """The image at a place of the batch, mirrored with probability 1/2, then shifted; computed pixel by pixel."""
    mirror, *moves = (int(random.fold(key, 3 * place + i)) for i in range(3))
    down, right = (((move >> 33) % (1 << 31)) % (2 * most + 1) - most for move in moves)
    _, height, width = image.shape
    result = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            row, column = i + down, j + right
            if mirror < 0:
                column = width - 1 - column
            if 0 <= row < height and 0 <= column < width:
                result[:, i, j] = image[:, row, column]
    return result


def train_client(
    module: nn.Module,
    fed: Federation,
    client: int,
    round: int,
    local: Local,
    correct: Callable[[nn.Module], None] | None = None,
    wave: int = 0,
    loss: Loss = nn.functional.cross_entropy,
) -> int:
    """Train a client's model in place and return the number of steps. `correct` may change the gradients."""
    module.train()
    step = optimiser(local, module, round)
    key = random.fold(random.bits(fed.seed, random.TRAIN, round, wave, client), random.DROPOUT)
    taken = 0
    for rows in batches(fed, client, round, local, wave):
        for layer in module.modules():
            if isinstance(layer, GivenDropout):
                layer.key = random.fold(key, taken)
        x = fed.x[rows].double()
        if local.augment == "flip_crop":
            moving = random.fold(random.bits(fed.seed, random.TRAIN, round, wave, client), random.FLIP)
            x = torch.stack([flipped(image, random.fold(moving, taken), i) for i, image in enumerate(x)])
        step.zero_grad()
        loss(module(x), fed.y[rows]).backward()
        if correct is not None:
            correct(module)
        if local.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), local.clip)
        step.step()
        taken += 1
    return taken


def weights(fed: Federation, cohort: list[int], local: Local) -> list[float]:
    sizes = [float(len(client_rows(fed, c))) if local.weighting == "size" else 1.0 for c in cohort]
    return [s / sum(sizes) for s in sizes]


def average_buffers(module: nn.Module, states: list[State], shares: list[float]) -> State:
    """The weighted mean of running statistics, and the largest value of counters."""
    merged = {}
    for name, _ in module.named_buffers():
        values = [s[name] for s in states]
        if values[0].is_floating_point():
            merged[name] = sum(p * v for p, v in zip(shares, values, strict=True))
        else:
            merged[name] = torch.stack(values).amax(0)
    return merged


def named(module: nn.Module) -> State:
    return {k: p.detach().clone() for k, p in module.named_parameters()}


def load(module: nn.Module, params: State, buffers: State) -> None:
    module.load_state_dict({**params, **buffers})

"""Small federations to check methods on: ragged clients, and classes that a model can tell apart."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from equipoise.core.federation import Federation, Split
from equipoise.core.local import Local
from equipoise.core.network import Network

SIZES = (7, 12, 1, 20, 5, 9)  # with batches of 4 there are full, short and single-sample batches
EQUAL = (8, 8, 8, 8)  # all clients take the same steps, so that a compiled program has one shape


def linear(features: int = 5, classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 6), nn.Tanh(), nn.Linear(6, classes))


def linear5() -> nn.Module:
    """`linear`, under a name that a configuration can hold."""
    return linear(5, 3)


def norm_cnn() -> nn.Module:
    """Convolutions and batch norm, for images of 6 x 6."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3),
        nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 4 * 4, 3),
    )  # fmt: skip


def dropout_cnn() -> nn.Module:
    """Convolutions and dropout, for images of 6 x 6."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.25), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 4 * 4, 8),
        nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3),
    )  # fmt: skip


def federation(
    model: nn.Module | None = None,
    sizes: tuple[int, ...] = SIZES,
    local: Local | None = None,
    cohort: int = 4,
    shape: tuple[int, ...] = (5,),
    classes: int = 3,
    seed: int = 3,
    auxiliary: int = 4,
) -> Federation:
    """Clients of the given sizes; each class is a cloud of samples around a centre of its own."""
    draw = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    y = torch.randint(0, classes, (total,), generator=draw)
    centres = torch.randn(classes, *shape, generator=draw)
    x = centres[y] + 0.7 * torch.randn(total, *shape, generator=draw)
    test_y = torch.arange(60) % classes
    test_x = centres[test_y] + 0.7 * torch.randn(60, *shape, generator=draw)
    held_y = torch.arange(auxiliary * classes) % classes
    held_x = centres[held_y] + 0.7 * torch.randn(len(held_y), *shape, generator=torch.Generator().manual_seed(seed))
    if model is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = linear(shape[0], classes)
    return Federation(
        network=Network(model),
        x=x,
        y=y,
        offsets=torch.tensor([0, *sizes]).cumsum(0),
        indices=torch.randperm(total, generator=draw),
        classes=tuple(str(c) for c in range(classes)),
        local=local or Local(lr=0.1, batch=4, epochs=2),
        cohort=cohort,
        seed=seed,
        minority=(0,),
        test=Split(test_x, test_y),
        auxiliary=Split(held_x, held_y) if auxiliary else None,
    )


def image_federation(model: nn.Module, **options: object) -> Federation:
    """For models with convolutions: images of 6 x 6 with one channel."""
    fed = federation(model, shape=(1, 6, 6), **options)  # type: ignore[arg-type]
    return replace(fed, local=replace(fed.local, lr=0.05))

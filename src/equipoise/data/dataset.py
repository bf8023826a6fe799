"""A data set in memory: a training pool to divide among clients, a test set, and what its numbers mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..errors import ConfigError, DataError, nearest
from .draw import Array
from .holdout import holdout

# Per channel, for pixels divided by 255. "imagenet" is what CLIMB's experiments used for CIFAR-10.
CONSTANTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "emnist": ((0.1736,), (0.3316,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "cinic10": ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images as uint8 [N, C, H, W], or float32 features [N, F] (also [N, C, H, W]).

    `mean` and `std` are per channel of images (uint8 is divided by 255 first) or per feature. They are
    applied when a batch is made, so that arrays stay as small as they came. `client` gives, for each
    training sample, the position of its owner in the sorted `roster`, where the data come with owners.
    `features` are the columns that `x` was read from, where the data come from a table.
    """

    name: str
    x: Array = field(repr=False)
    y: Array = field(repr=False)
    test_x: Array | None = field(repr=False)
    test_y: Array | None = field(repr=False)
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    client: Array | None = field(default=None, repr=False)
    roster: tuple[str, ...] | None = field(default=None, repr=False)
    features: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self.check()

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def counts(self) -> Array:
        """Training samples per class."""
        return np.bincount(self.y, minlength=self.num_classes)

    def check(self) -> None:
        """Refuse what no training could use: each fault is one sentence."""
        if self.num_classes < 2:
            raise DataError(f"{self.name}: at least 2 classes are needed, found {self.num_classes}")
        check_part(f"{self.name}: the training set", self.x, self.y, self.num_classes)
        if (self.test_x is None) != (self.test_y is None):
            raise DataError(f"{self.name}: a test set needs both features and labels, one of them is missing")
        if self.test_x is not None and self.test_y is not None:
            check_part(f"{self.name}: the test set", self.test_x, self.test_y, self.num_classes)
            if self.test_x.shape[1:] != self.x.shape[1:] or self.test_x.dtype != self.x.dtype:
                raise DataError(
                    f"{self.name}: test samples are {self.test_x.dtype} {list(self.test_x.shape[1:])}, "
                    f"training samples {self.x.dtype} {list(self.x.shape[1:])}"
                )
        if not len(self.mean) == len(self.std) == self.x.shape[1] or min(self.std) <= 0:
            raise DataError(
                f"{self.name}: mean and std need one number (std above 0) for each of {self.x.shape[1]} "
                f"channels or features, found {len(self.mean)} and {len(self.std)}"
            )
        if self.features and len(self.features) != self.x.shape[1]:
            raise DataError(f"{self.name}: {len(self.features)} columns are named for {self.x.shape[1]} features")
        self._check_clients()

    def _check_clients(self) -> None:
        if (self.client is None) != (self.roster is None):
            raise DataError(f"{self.name}: clients and their roster come together, one of them is missing")
        if self.client is None or self.roster is None:
            return
        if list(self.roster) != sorted(set(self.roster)):
            raise DataError(f"{self.name}: the roster must list every client once, in sorted order")
        if self.client.shape != self.y.shape or self.client.dtype != np.int64:
            raise DataError(
                f"{self.name}: clients must be int64, one for each of {len(self.y)} samples, "
                f"not {self.client.dtype} {list(self.client.shape)}"
            )
        if self.client.min() < 0 or self.client.max() >= len(self.roster):
            raise DataError(f"{self.name}: a client lies outside the roster of {len(self.roster)}")
        sizes = np.bincount(self.client, minlength=len(self.roster))
        if not sizes.all():
            raise DataError(f"{self.name}: client {self.roster[int(np.argmin(sizes))]!r} has no training sample")


def assemble(
    name: str,
    pool: tuple[Array, Array],
    test: tuple[Array, Array] | float,
    classes: tuple[str, ...],
    normalise: str,
    seed: int = 0,
    clients: tuple[Array, tuple[str, ...]] | None = None,
    features: tuple[str, ...] = (),
) -> Dataset:
    """A data set from samples and labels, with a test set or the fraction of each class to hold out as one.

    Faults are found before anything is held out, so that they are named by their row in the file.
    """
    x, y = pool
    owner, roster = clients or (None, None)
    check_part(f"{name}: the training set", x, y, len(classes))
    test_x: Array | None = None
    test_y: Array | None = None
    if isinstance(test, tuple):
        test_x, test_y = test
    elif (chosen := holdout(y, test, seed, owner)).any():
        x, y, test_x, test_y = x[~chosen], y[~chosen], x[chosen], y[chosen]
        owner = None if owner is None else owner[~chosen]
    mean, std = normalisation(normalise, x)
    return Dataset(name, x, y, test_x, test_y, classes, mean, std, owner, roster, features)


def check_part(where: str, x: Array, y: Array, num_classes: int) -> None:
    """Refuse samples and labels that do not fit each other; `where` names them."""
    _check_kind(where, x)
    if y.ndim != 1 or len(y) != len(x):
        raise DataError(f"{where} has {len(x)} samples but labels of shape {list(y.shape)}")
    if y.dtype != np.int64:
        raise DataError(f"{where} needs int64 labels, not {y.dtype}")
    if y.min() < 0 or y.max() >= num_classes:
        row = int(np.argmax((y < 0) | (y >= num_classes)))
        raise DataError(
            f"{where} has label {y[row]} in row {row + 1}, outside 0 to {num_classes - 1} ({num_classes} classes)"
        )
    _check_finite(where, x)


def check_samples(where: str, x: Array) -> None:
    """Refuse samples that no model could use, whatever their labels."""
    _check_kind(where, x)
    _check_finite(where, x)


def _check_kind(where: str, x: Array) -> None:
    if x.size == 0:
        raise DataError(f"{where} is empty")
    if (x.dtype.name, x.ndim) not in (("uint8", 4), ("float32", 4), ("float32", 2)):
        raise DataError(
            f"{where} must be uint8 or float32 [N, C, H, W] or float32 [N, F], not {x.dtype} {list(x.shape)}"
        )


def _check_finite(where: str, x: Array) -> None:
    if x.dtype == np.float32 and not np.isfinite(x).all():
        row, *rest = (int(i) for i in np.argwhere(~np.isfinite(x))[0])
        raise DataError(
            f"{where} has {x[(row, *rest)]} in row {row + 1}, feature {rest[0] + 1}: "
            "every feature must be a finite number"
        )


def normalisation(choice: str, x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std by name: a data set's usual constants, "pool" (of `x` itself) or "none" (0 and 1)."""
    channels = x.shape[1]
    if choice == "none":
        return (0.0,) * channels, (1.0,) * channels
    if choice == "pool":
        return _moments(x)
    if not isinstance(choice, str) or choice not in CONSTANTS:
        raise ConfigError(
            f"normalise is {choice!r}, which is unknown: {nearest(choice, [*CONSTANTS, 'pool', 'none'])}"
        )
    mean, std = CONSTANTS[choice]
    if len(mean) != channels or x.dtype != np.uint8:
        raise ConfigError(
            f"normalise = {choice!r} is for images of {len(mean)} channels with pixels from 0 to 255, "
            f"not for {x.dtype} {list(x.shape[1:])}: use 'pool' or 'none'"
        )
    return mean, std


def _moments(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Two passes in blocks: exact enough for any table, and never a second copy of the images."""
    unit = 255.0 if x.dtype == np.uint8 else 1.0

    def blocks() -> Iterator[Array]:
        """Rows of channels, a few samples at a time."""
        for start in range(0, len(x), 2048):
            block = np.moveaxis(x[start : start + 2048], 1, -1)
            yield block.reshape(-1, x.shape[1]).astype(np.float64) / unit

    rows = x.size // x.shape[1]
    mean = sum((block.sum(axis=0) for block in blocks()), np.zeros(x.shape[1])) / rows
    variance = sum((((block - mean) ** 2).sum(axis=0) for block in blocks()), np.zeros(x.shape[1])) / rows
    std = np.sqrt(variance)
    std = np.where(std <= 1e-9 * np.abs(mean), 1.0, std)  # a constant feature stays at zero
    return tuple(mean.tolist()), tuple(std.tolist())

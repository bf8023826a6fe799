"""A data set in memory: a pool of training samples, a test set, the classes, and the mean and std of the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from equipoise.core.errors import ConfigError, DataError, nearest

from .draw import Array
from .holdout import holdout

# Mean and std per channel, of pixels divided by 255. CLIMB's experiments used "imagenet" for CIFAR-10.
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
    """Samples as uint8 [N, C, H, W], float32 [N, C, H, W] or float32 [N, F], with labels from 0 to K - 1.

    `mean` and `std` have one number per channel (uint8 is divided by 255 first) or per feature. Batches are
    normalised when they are made, so that the arrays keep their small dtype. If every sample has an owner,
    `roster` lists the owners in sorted order and `client` has the position in it for each training sample.
    If the data come from a table, `columns` names the columns of `x`.
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
    columns: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self.check()

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def counts(self) -> Array:
        """The number of training samples of each class."""
        return np.bincount(self.y, minlength=self.num_classes)

    def check(self) -> None:
        """Raise DataError if the data set cannot be used for training."""
        if self.num_classes < 2:
            raise DataError(f"{self.name}: expected at least 2 classes, found {self.num_classes}")
        check_part(f"{self.name}: the training set", self.x, self.y, self.num_classes)
        if (self.test_x is None) != (self.test_y is None):
            raise DataError(f"{self.name}: a test set needs both test_x and test_y, and one of them is missing")
        if self.test_x is not None and self.test_y is not None:
            check_part(f"{self.name}: the test set", self.test_x, self.test_y, self.num_classes)
            if self.test_x.shape[1:] != self.x.shape[1:] or self.test_x.dtype != self.x.dtype:
                raise DataError(
                    f"{self.name}: test samples are {self.test_x.dtype} {list(self.test_x.shape[1:])}, "
                    f"and training samples are {self.x.dtype} {list(self.x.shape[1:])}"
                )
        if not len(self.mean) == len(self.std) == self.x.shape[1] or min(self.std) <= 0:
            raise DataError(
                f"{self.name}: mean and std need one number (std above 0) for each of {self.x.shape[1]} "
                f"channels or features, found {len(self.mean)} and {len(self.std)}"
            )
        if self.columns and len(self.columns) != self.x.shape[1]:
            raise DataError(f"{self.name} names {len(self.columns)} columns for {self.x.shape[1]} features")
        self._check_clients()

    def _check_clients(self) -> None:
        if (self.client is None) != (self.roster is None):
            raise DataError(f"{self.name}: client and roster must be given together, and one of them is missing")
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
            row = int(np.argmax((self.client < 0) | (self.client >= len(self.roster))))
            raise DataError(
                f"{self.name} has client {self.client[row]} in row {row + 1}, outside 0 to {len(self.roster) - 1}"
                f" (the roster lists {len(self.roster)} clients)"
            )
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
    columns: tuple[str, ...] = (),
) -> Dataset:
    """Make a data set from samples and labels.

    `test` is the test set, or the fraction of each class to hold out as one. The samples are checked before any are
    held out, so that errors name the row in the file.
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
    return Dataset(name, x, y, test_x, test_y, classes, mean, std, owner, roster, columns)


def check_part(where: str, x: Array, y: Array, num_classes: int) -> None:
    """Raise DataError if samples and labels do not fit each other; `where` names them in the error."""
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
    """Raise DataError if no model could use the samples; `where` names them in the error."""
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
    """Return mean and std by name: the usual constants of a data set, "pool" (those of `x`) or "none" (0 and 1)."""
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
    """Compute mean and std of each channel in two passes, in float64.

    The passes go over blocks of samples, so that there is never a float copy of all images.
    """
    unit = 255.0 if x.dtype == np.uint8 else 1.0

    def blocks() -> Iterator[Array]:
        """Yield a few samples at a time as [values, channels]."""
        for start in range(0, len(x), 2048):
            block = np.moveaxis(x[start : start + 2048], 1, -1)
            yield block.reshape(-1, x.shape[1]).astype(np.float64) / unit

    rows = x.size // x.shape[1]
    mean = sum((block.sum(axis=0) for block in blocks()), np.zeros(x.shape[1])) / rows
    variance = sum((((block - mean) ** 2).sum(axis=0) for block in blocks()), np.zeros(x.shape[1])) / rows
    std = np.sqrt(variance)
    std = np.where(std <= 1e-9 * np.abs(mean), 1.0, std)  # a constant feature is normalised to zero
    return tuple(mean.tolist()), tuple(std.tolist())

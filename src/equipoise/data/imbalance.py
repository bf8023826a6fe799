"""Global class imbalance: chooses which samples of a balanced pool are kept.

An imbalance is a frozen dataclass that is called as `(y, num_classes, seed)` and returns the indices of the kept
samples in file order. Counts are exact: rounded to the nearest (halves up), and at least one for a class that has
samples. All imbalances draw the samples in the same way from `seed`, so that a stronger imbalance keeps a subset of
what a weaker one keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from equipoise.core.errors import ConfigError, DataError

from .draw import Array, by_class, generator, rank_in_class
from .fields import flag, real, whole

# The relative frequency of the letters a to z in English text, in percent.
ENGLISH = (
    8.167, 1.492, 2.782, 4.253, 12.702, 2.228, 2.015, 6.094, 6.966, 0.153, 0.772, 4.025, 2.406,
    6.749, 7.507, 1.929, 0.095, 5.987, 6.327, 9.056, 2.758, 0.978, 2.360, 0.150, 1.974, 0.074,
)  # fmt: skip
DIGITS = "0123456789"
UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
EMNIST_CLASSES: dict[int, str] = {  # the class layouts of EMNIST: letters, balanced and bymerge, byclass
    26: UPPER,
    47: DIGITS + UPPER + "abdefghnqrt",
    62: DIGITS + UPPER + UPPER.lower(),
}


class Imbalance(Protocol):
    def __call__(self, y: Array, num_classes: int, seed: int) -> Array: ...


@dataclass(frozen=True)
class Unchanged:
    """Keeps every sample."""

    def __call__(self, y: Array, num_classes: int, seed: int) -> Array:
        class_counts(y, num_classes)
        return np.arange(len(y))


@dataclass(frozen=True)
class Step:
    """Keeps one in `rho` samples of each minority class, and all samples of the other classes.

    With `joint`, as in the reference code of CLIMB, the n samples of all minority classes are taken together and
    the first int(n / rho) of them in file order are kept; the minority classes then have roughly equal counts.

    >>> Step(rho=5, minority=(1,))(np.repeat([0, 1], 10), num_classes=2, seed=0).size
    12
    """

    rho: float
    minority: tuple[int, ...] = (0,)
    joint: bool = False

    def __post_init__(self) -> None:
        real("step: rho", self.rho, 1)
        flag("step: joint", self.joint)
        object.__setattr__(self, "minority", _classes("step: minority", self.minority))
        if not self.minority:
            raise ConfigError("step: minority must name at least one class, for example minority = [0]")

    def __call__(self, y: Array, num_classes: int, seed: int) -> Array:
        counts = class_counts(y, num_classes)
        minority = list(_within("step: minority", self.minority, num_classes))
        if self.joint:
            rare = np.isin(y, minority)
            return np.flatnonzero(~rare | (np.cumsum(rare) <= int(rare.sum() / self.rho)))
        wanted = counts.copy()
        wanted[minority] = _rounded(counts[minority] / self.rho, counts[minority])
        return _keep(y, wanted, seed)


@dataclass(frozen=True)
class LongTail:
    """Keeps n_max * factor**(-c / (K - 1)) samples of class c: the first class has `factor` times the last.

    A factor below 1 means its inverse (papers write 100 or 0.01). As for every curve here, n_max is the largest
    number at which no class would need more samples than it has (5000 for CIFAR-10), so that the shape is exact.
    `order` lists the classes from the most to the least frequent, by default 0, 1, 2, ...
    """

    factor: float
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        factor = real("longtail: factor", self.factor, 0, above=True)
        object.__setattr__(self, "factor", factor if factor >= 1 else min(1 / factor, sys.float_info.max))
        object.__setattr__(self, "order", _order("longtail", self.order))

    def __call__(self, y: Array, num_classes: int, seed: int) -> Array:
        curve = self.factor ** -np.linspace(0, 1, num_classes)
        return _keep_curve(y, curve, self.order, seed)


@dataclass(frozen=True)
class HalfNormal:
    """Keeps samples of class c in proportion to exp(-(c / scale)**2 / 2), the half-normal curve of Astraea."""

    scale: float
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        real("halfnormal: scale", self.scale, 0, above=True)
        object.__setattr__(self, "order", _order("halfnormal", self.order))

    def __call__(self, y: Array, num_classes: int, seed: int) -> Array:
        with np.errstate(over="ignore"):  # a narrow curve is zero from the second class on
            curve = np.exp(-((np.arange(num_classes) / self.scale) ** 2) / 2)
        return _keep_curve(y, curve, self.order, seed)


@dataclass(frozen=True)
class Zipf:
    """Keeps samples of class c in proportion to (c + 1)**-exponent."""

    exponent: float
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        real("zipf: exponent", self.exponent, 0)
        object.__setattr__(self, "order", _order("zipf", self.order))

    def __call__(self, y: Array, num_classes: int, seed: int) -> Array:
        curve = np.exp(-self.exponent * np.log(np.arange(1, num_classes + 1)))
        return _keep_curve(y, curve, self.order, seed)


@dataclass(frozen=True)
class Linear:
    """Keeps fewer samples from class to class, in equal steps; the first class keeps `ratio` times the last."""

    ratio: float
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        real("linear: ratio", self.ratio, 1)
        object.__setattr__(self, "order", _order("linear", self.order))

    def __call__(self, y: Array, num_classes: int, seed: int) -> Array:
        return _keep_curve(y, np.linspace(1, 1 / self.ratio, num_classes), self.order, seed)


@dataclass(frozen=True)
class Letters:
    """Keeps letters in proportion to their frequency in English text, for the 26, 47 or 62 classes of EMNIST.

    A letter with two classes (upper and lower case) gives half of its frequency to each. Texts on the subject do
    not say how frequent digits are; here each digit has the frequency `digit`, by default that of an average letter.
    With `total`, a class keeps its share of that many samples, or all of its samples if it has fewer.
    """

    total: int | None = None
    digit: float = 1 / 26

    def __post_init__(self) -> None:
        if self.total is not None:
            whole("letters: total", self.total, 1)
        real("letters: digit", self.digit, 0, above=True)

    def __call__(self, y: Array, num_classes: int, seed: int) -> Array:
        if num_classes not in EMNIST_CLASSES:
            raise ConfigError(
                f"letters needs the 26, 47 or 62 classes of EMNIST, and this data set has {num_classes} classes"
            )
        names = EMNIST_CLASSES[num_classes]
        cases = {letter: names.upper().count(letter) for letter in UPPER}
        frequency = dict(zip(UPPER, np.array(ENGLISH) / sum(ENGLISH), strict=True))
        curve = np.array([self.digit if c in DIGITS else frequency[c.upper()] / cases[c.upper()] for c in names])
        if self.total is None:
            return _keep_curve(y, curve, None, seed)
        available = class_counts(y, num_classes)
        return _keep(y, _rounded(self.total * curve / curve.sum(), available), seed)


@dataclass(frozen=True)
class Counts:
    """Keeps exactly `counts[c]` samples of class c; a class that a mapping does not name keeps all its samples."""

    counts: tuple[int, ...] | dict[int, int]

    def __post_init__(self) -> None:
        given: object = self.counts
        if isinstance(given, Mapping):
            keys = [int(key) if isinstance(key, str) and key.isdecimal() else key for key in given]
            classes = [whole("counts: a class", key, 0) for key in keys]
            numbers = [whole(f"counts: class {c}", n, 0) for c, n in zip(classes, given.values(), strict=True)]
            object.__setattr__(self, "counts", dict(zip(classes, numbers, strict=True)))
        elif isinstance(given, Sequence) and not isinstance(given, str):
            object.__setattr__(self, "counts", tuple(whole(f"counts: class {c}", n, 0) for c, n in enumerate(given)))
        else:
            raise ConfigError(f"counts must be a list of numbers or a table of class = number, not {given!r}")

    def __call__(self, y: Array, num_classes: int, seed: int) -> Array:
        available = class_counts(y, num_classes)
        wanted = available.astype(object)  # a count may be too large for int64
        if isinstance(self.counts, dict):
            _within("counts", tuple(self.counts), num_classes)
            wanted[list(self.counts)] = list(self.counts.values())
        elif len(self.counts) != num_classes:
            raise ConfigError(f"counts lists {len(self.counts)} numbers for {num_classes} classes")
        else:
            wanted[:] = self.counts
        if (wanted > available).any():
            c = int(np.argmax(wanted > available))
            raise DataError(f"counts asks for {wanted[c]} samples of class {c}, which has {available[c]}")
        if not wanted.any():
            raise DataError("counts keeps no sample at all")
        return _keep(y, wanted.astype(np.int64), seed)


IMBALANCES: dict[str, type[Any]] = {
    "none": Unchanged,
    "step": Step,
    "longtail": LongTail,
    "halfnormal": HalfNormal,
    "zipf": Zipf,
    "linear": Linear,
    "letters": Letters,
    "counts": Counts,
}


def minority(counts: Sequence[int] | Array) -> list[int]:
    """Return the classes that have less than half of the mean count.

    >>> minority([50, 60, 8])
    [2]
    """
    numbers = np.asarray(counts)
    return [int(c) for c in np.flatnonzero(numbers < numbers.mean() / 2)] if numbers.size else []


def class_counts(y: Array, num_classes: int) -> Array:
    """Return the number of samples of each class, after checking that every label is a class number."""
    if y.dtype.kind not in "iu":
        raise DataError(f"labels must be integers, not {y.dtype}")
    if y.size == 0:
        raise DataError("there are no samples to choose from")
    if y.min() < 0 or y.max() >= num_classes:
        row = int(np.argmax((y < 0) | (y >= num_classes)))
        raise DataError(f"label {y[row]} of sample {row} is outside 0 to {num_classes - 1}")
    return np.bincount(y, minlength=num_classes)


def _rounded(wanted: Array, available: Array) -> Array:
    """Round halves up, to at least one and at most what is available."""
    counts = np.minimum(np.maximum(np.floor(wanted + 0.5), 1), available)
    return counts.astype(np.int64)


def _keep(y: Array, wanted: Array, seed: int) -> Array:
    """Draw `wanted[c]` samples of each class c; return their indices in file order."""
    order = by_class(y, generator(seed, "imbalance"))
    return np.sort(order[rank_in_class(y, order) < wanted[y[order]]]).astype(np.int64)


def _keep_curve(y: Array, curve: Array, order: tuple[int, ...] | None, seed: int) -> Array:
    """Keep as many samples as possible with class counts in proportion to `curve`, which follows `order`."""
    available = class_counts(y, len(curve))
    weights = np.empty(len(curve))
    weights[_full_order(order, len(curve))] = curve
    present = (available > 0) & (weights > 0)
    # If a steep curve is zero for all classes that have samples, n_max has no upper bound: each keeps one sample.
    with np.errstate(over="ignore"):
        n_max = (available[present] / weights[present]).min(initial=sys.float_info.max)
        wanted = n_max * weights
    return _keep(y, _rounded(wanted, available), seed)


def _full_order(order: tuple[int, ...] | None, num_classes: int) -> Array:
    if order is None:
        return np.arange(num_classes)
    if sorted(order) != list(range(num_classes)):
        raise ConfigError(f"order must list each of the {num_classes} classes once, not {list(order)}")
    return np.array(order)


def _order(name: str, order: object) -> tuple[int, ...] | None:
    return None if order is None else _classes(f"{name}: order", order)


def _classes(where: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{where} must be a list of class numbers, not {value!r}")
    classes = tuple(whole(f"{where}: a class", c, 0) for c in value)
    if len(set(classes)) < len(classes):
        raise ConfigError(f"{where} names a class twice: {list(classes)}")
    return classes


def _within(where: str, classes: tuple[int, ...], num_classes: int) -> tuple[int, ...]:
    for c in classes:
        if c >= num_classes:
            raise ConfigError(f"{where} names class {c}, and the classes are 0 to {num_classes - 1}")
    return classes

"""A division of a pool among clients, and the ways to cut one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import DataError
from .draw import Array, by_class


@dataclass(frozen=True, eq=False)
class Partition:
    """Client i owns `indices[offsets[i]:offsets[i + 1]]`."""

    offsets: Array
    indices: Array

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Array:
        return np.diff(self.offsets)

    def client(self, i: int) -> Array:
        """The samples of client i."""
        if not 0 <= i < len(self):
            raise IndexError(f"client {i} of {len(self)}")
        return self.indices[self.offsets[i] : self.offsets[i + 1]]

    def over(self, kept: Array) -> Partition:
        """The same division of `kept`: positions in a chosen part of the pool become its indices."""
        return Partition(self.offsets, kept[self.indices])

    def check(self, n: int) -> Partition:
        """Itself, if offsets are in order and each of `n` samples has at most one owner."""
        if len(self.offsets) < 2 or self.offsets[0] != 0 or self.offsets[-1] != len(self.indices):
            raise DataError("a partition's offsets must go from 0 to the number of its indices")
        if (self.offsets[1:] < self.offsets[:-1]).any():
            raise DataError("a partition's offsets must not decrease")
        if self.indices.size and (self.indices.min() < 0 or self.indices.max() >= n):
            raise DataError(f"a partition's indices must lie between 0 and {n - 1}")
        seen = np.zeros(n, dtype=bool)
        seen[self.indices] = True
        if np.count_nonzero(seen) != len(self.indices):
            raise DataError("a partition must not give one sample to two clients")
        return self


class Partitioner(Protocol):
    def __call__(self, y: Array, num_classes: int, seed: int, client: Array | None = None) -> Partition: ...


def even_size(name: str, n: int, clients: int) -> int:
    """How many samples each client gets where all get the same."""
    if n < clients:
        raise DataError(f"{name}: {clients} clients of one sample or more need {clients}, and there are {n}")
    return n // clients


def bounds(sizes: Array) -> Array:
    """Where parts of the given sizes begin, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def apportion(total: int, weights: Array) -> Array:
    """Whole numbers in proportion to weights, each within one of its share, with the exact sum.

    >>> apportion(10, np.array([1.0, 1.0, 2.0])).tolist()
    [2, 3, 5]
    """
    shares = np.cumsum(weights)
    edges = np.rint(total * (shares / shares[-1])).astype(np.int64)
    return np.diff(edges, prepend=0)


def gather(order: Array, starts: Array, lengths: Array, sizes: Array) -> Partition:
    """Stretches of `order` put one after another; every client owns a whole number of them."""
    position = np.repeat(starts - bounds(lengths)[:-1], lengths)
    position += np.arange(len(position))
    return Partition(bounds(sizes), order[position])


def divide(y: Array, table: Array, draws: np.random.Generator) -> Partition:
    """Random samples of each class [K] to each client [N], as many as the table says."""
    counts = np.bincount(y, minlength=table.shape[1])
    starts = bounds(counts)[:-1] + np.cumsum(table, axis=0) - table
    return gather(by_class(y, draws), starts.ravel(), table.ravel(), table.sum(axis=1)).check(len(y))

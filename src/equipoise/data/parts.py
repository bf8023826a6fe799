"""The result of a partitioner, and the functions with which partitioners make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from equipoise.core.errors import DataError

from .draw import Array, by_class


@dataclass(frozen=True, eq=False)
class Partition:
    """A division of a pool among clients: client i owns the samples `indices[offsets[i]:offsets[i + 1]]`."""

    offsets: Array
    indices: Array

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Array:
        return np.diff(self.offsets)

    def client(self, i: int) -> Array:
        """Return the indices of the samples of client i."""
        if not 0 <= i < len(self):
            raise IndexError(f"there is no client {i}: the partition has {len(self)} clients")
        return self.indices[self.offsets[i] : self.offsets[i + 1]]

    def over(self, kept: Array) -> Partition:
        """Translate a partition of the array `kept` into one of the pool: each index i becomes `kept[i]`."""
        return Partition(self.offsets, kept[self.indices])

    def check(self, n: int) -> Partition:
        """Return the partition if its offsets do not decrease and each of `n` samples has at most one owner.

        Otherwise raise DataError.
        """
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
    """Return how many of n samples each client gets if all clients get the same number."""
    if n < clients:
        raise DataError(f"{name}: {clients} clients need at least {clients} samples, and there are {n}")
    return n // clients


def bounds(sizes: Array) -> Array:
    """Return the offsets at which consecutive parts of the given sizes begin, and the end of the last part."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def apportion(total: int, weights: Array) -> Array:
    """Divide `total` into whole numbers in proportion to the weights, each within one of its exact share.

    >>> apportion(10, np.array([1.0, 1.0, 2.0])).tolist()
    [2, 3, 5]
    """
    shares = np.cumsum(weights)
    edges = np.rint(total * (shares / shares[-1])).astype(np.int64)
    return np.diff(edges, prepend=0)


def gather(order: Array, starts: Array, lengths: Array, sizes: Array) -> Partition:
    """Concatenate the pieces `order[start:start + length]`, and divide the result into clients of the given sizes.

    Every client must own a whole number of pieces.
    """
    position = np.repeat(starts - bounds(lengths)[:-1], lengths)
    position += np.arange(len(position))
    return Partition(bounds(sizes), order[position])


def divide(y: Array, table: Array, draws: np.random.Generator) -> Partition:
    """Give client i `table[i, c]` random samples of each class c."""
    counts = np.bincount(y, minlength=table.shape[1])
    starts = bounds(counts)[:-1] + np.cumsum(table, axis=0) - table
    return gather(by_class(y, draws), starts.ravel(), table.ravel(), table.sum(axis=1)).check(len(y))

"""Seeded draws for data: every use has a stream of its own, so that no draw depends on another."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def generator(seed: int, use: str) -> np.random.Generator:
    """A counter-based stream that depends on (seed, use) and nothing else.

    >>> generator(0, "iid").random() == generator(0, "iid").random()
    True
    """
    key = hashlib.blake2b(f"{use}:{int(seed)}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def shuffled(n: int, draws: np.random.Generator) -> Array:
    """The numbers below n in random order, in the narrowest of int32 and int64 that holds them."""
    order = np.arange(n, dtype=np.int32 if n < 2**31 else np.int64)
    draws.shuffle(order)
    return order


def sort_by(labels: Array, order: Array) -> Array:
    """`order` sorted by label, samples of one label kept as they stand."""
    keys = labels[order]
    if keys.size and keys.max() < 2**16:  # numpy sorts short integers by radix: ten times faster
        keys = keys.astype(np.uint8 if keys.max() < 2**8 else np.uint16)
    return order[np.argsort(keys, kind="stable")]


def by_class(labels: Array, draws: np.random.Generator) -> Array:
    """All samples sorted by class, in random order within each."""
    return sort_by(labels, shuffled(len(labels), draws))


def rank_in_class(labels: Array, order: Array) -> Array:
    """For `order` sorted by class: how many samples of the same class stand before each."""
    counts = np.bincount(labels)
    return np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)

"""Chooses a test set from a pool of samples that comes without one."""

from __future__ import annotations

import numpy as np

from .draw import Array, by_class, generator, rank_in_class
from .fields import real, whole


def holdout(y: Array, fraction: float, seed: int, client: Array | None = None) -> Array:
    """Return a mask of the test samples: `fraction` of each class, rounded to the nearest, drawn by `seed`.

    One sample of each client always stays in the pool, so that no client becomes empty.

    >>> y = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    >>> y[holdout(y, 0.2, seed=0)].tolist()
    [0, 1]
    """
    draws = generator(whole("seed", seed, 0), "holdout")
    free = np.ones(len(y), dtype=bool)
    if client is not None:
        order = draws.permutation(len(y))
        free[order[np.unique(client[order], return_index=True)[1]]] = False
    wanted = np.floor(np.bincount(y) * real("test", fraction, 0, 1) + 0.5)
    candidates = np.flatnonzero(free)
    labels = y[candidates]
    order = by_class(labels, draws)
    chosen = order[rank_in_class(labels, order) < wanted[labels[order]]]
    test = np.zeros(len(y), dtype=bool)
    test[candidates[chosen]] = True
    return test

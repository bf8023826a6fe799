"""Builds a federation from one pool of samples: hold some out, make the rest imbalanced, divide it among clients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core import random
from equipoise.core.errors import ConfigError, DataError
from equipoise.core.federation import Federation, Split
from equipoise.core.local import Local
from equipoise.core.network import initialised

from .dataset import Dataset
from .holdout import holdout
from .imbalance import minority as rare_classes
from .partition import Natural
from .parts import Partition


def federate(
    data: Dataset,
    model: Callable[[], nn.Module],
    partition: Callable[..., Partition],
    *,
    imbalance: Callable[[np.ndarray, int, int], np.ndarray] | None = None,
    local: Local | None = None,
    cohort: int | float | None = None,
    seed: int = 0,
    validation: float = 0.0,
    auxiliary: int = 0,
    local_test: float = 0.0,
    minority: tuple[int, ...] | None = None,
    kind: Hashable | None = None,
) -> Federation:
    """Build a federation from one pool of samples.

    First the server's auxiliary samples and the validation set are taken out of the pool, which is still as balanced
    as the data set. Then the pool is made imbalanced, and then it is divided among the clients. Each client holds out
    a share `local_test` of its samples, by class. Networks of the same `kind` differ only in the values of their
    parameters, so that they can share compiled programs.
    """
    classes = len(data.classes)
    _check(classes, cohort, validation, auxiliary, local_test, minority)
    pool = np.arange(len(data.y))
    pool, held_aux = _hold_out(pool, data.y, [auxiliary] * classes, seed, 0, "auxiliary")
    share = [round(validation * n) for n in np.bincount(data.y[pool], minlength=classes)]
    pool, held_validation = _hold_out(pool, data.y, share, seed, 1, "validation")
    if imbalance is not None:
        with _about("data.imbalance"):
            pool = pool[imbalance(data.y[pool], classes, seed)]
    client = None if data.client is None else data.client[pool]
    if isinstance(partition, Natural) and data.roster is not None:
        # The imbalance may have removed every sample of the last clients, which would then not be counted.
        partition = replace(partition, clients=len(data.roster))
    with _about("data.partition"):
        parts = partition(data.y[pool], classes, seed, client)
    sizes = parts.sizes
    if len(sizes) == 0:
        raise DataError("data.partition made no clients; expected at least one")
    clients = len(sizes)
    if isinstance(cohort, float):
        cohort = max(1, round(cohort * clients))
    if cohort is not None and not 1 <= cohort <= clients:
        raise ConfigError(f"train.cohort = {cohort}: expected 1 to {clients}, the number of clients")
    network = initialised(model, seed, kind)

    def split(rows: np.ndarray) -> Split | None:
        return Split(_tensor(data.x[rows]), _tensor(data.y[rows])) if len(rows) else None

    counts = np.bincount(data.y[pool], minlength=classes)
    offsets, indices = parts.offsets.astype(np.int64), pool[parts.indices]
    held = _held_by_clients(data.y[indices], offsets, local_test, seed)
    fed = Federation(
        network=network,
        x=_tensor(data.x),
        y=_tensor(data.y),
        offsets=_tensor(_offsets(offsets, ~held)),
        indices=_tensor(indices[~held]),
        classes=data.classes,
        mean=data.mean,
        std=data.std,
        local=local or Local(),
        cohort=cohort or 0,
        seed=seed,
        minority=tuple(rare_classes(counts.tolist())) if minority is None else minority,
        test=None if data.test_x is None or data.test_y is None
        else Split(_tensor(data.test_x), _tensor(data.test_y)),
        validation=split(held_validation),
        auxiliary=split(held_aux),
        roster=data.roster if isinstance(partition, Natural) else None,
        columns=data.columns,
        held_offsets=_tensor(_offsets(offsets, held)) if held.any() else None,
        held_indices=_tensor(indices[held]) if held.any() else None,
    )  # fmt: skip
    probe = fed.inputs(torch.device("cpu"), torch.float32)(fed.x[:2])
    network.check(probe, classes)
    return fed


def _tensor(array: np.ndarray) -> Tensor:
    """Share the array's memory with a tensor; copy only a read-only array, about which torch would warn."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


@contextmanager
def _about(table: str) -> Iterator[None]:
    """Name the config table in errors raised inside, which some settings cause only together with certain data."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"{table}: {error}") from error


def _check(
    classes: int,
    cohort: float | None,
    validation: float,
    auxiliary: int,
    local_test: float,
    minority: tuple[int, ...] | None,
) -> None:
    def need(ok: bool, name: str, value: object, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{name} = {value!r}: expected {expected}")

    if isinstance(cohort, float):
        need(0 < cohort <= 1, "train.cohort", cohort, "a share above 0 and at most 1")
    need(0 <= validation < 1, "data.validation", validation, "a number in [0, 1)")
    need(0 <= local_test < 1, "data.local_test", local_test, "a number in [0, 1)")
    need(isinstance(auxiliary, int) and auxiliary >= 0, "data.auxiliary", auxiliary, "a whole number, 0 or above")
    known = all(0 <= label < classes for label in minority or ())
    need(known, "data.minority", minority, f"class numbers from 0 to {classes - 1}")


def _hold_out(
    pool: np.ndarray, y: np.ndarray, counts: list[int], seed: int, use: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Take `counts[c]` samples of each class c out of the pool; return the rest and the samples taken."""
    if not any(counts):
        return pool, pool[:0]
    shuffled = pool[random.order(random.bits(seed, random.SPLIT, use), len(pool)).numpy()]
    held = []
    for label, count in enumerate(counts):
        mine = shuffled[y[shuffled] == label]
        if len(mine) < count:
            raise DataError(f"data.{name} asks for {count} samples of class {label}, which has {len(mine)}")
        held.append(mine[:count])
    rows = np.sort(np.concatenate(held))
    return np.setdiff1d(pool, rows, assume_unique=True), rows


def _held_by_clients(y: np.ndarray, offsets: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Return a mask of the samples that clients hold out, each from its own samples, as a real site would."""
    held = np.zeros(len(y), dtype=bool)
    for low, high in itertools.pairwise(offsets.tolist()) if share else ():
        held[low:high] = holdout(y[low:high], share, seed, np.zeros(high - low, np.int64))
    return held


def _offsets(offsets: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return where each client's samples begin among the chosen ones."""
    counts: np.ndarray = np.concatenate([[0], np.cumsum(chosen)])[offsets]
    return counts.astype(np.int64)

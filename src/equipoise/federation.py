"""A federation: a model, clients with their samples, what the server holds, and how training goes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from equipoise import random
from equipoise.data import Dataset, Natural, Partition
from equipoise.data import minority as rare_classes
from equipoise.errors import ConfigError, DataError
from equipoise.local import Local
from equipoise.network import Network


@dataclass(frozen=True, eq=False)
class Split:
    """Samples held apart from the clients: a test set, a validation set, the server's auxiliary set."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Federation:
    network: Network = field(repr=False)
    x: Tensor = field(repr=False)  # all clients' samples, raw; uint8 where they are images
    y: Tensor = field(repr=False)
    offsets: Tensor = field(repr=False)  # client i holds indices[offsets[i] : offsets[i + 1]]
    indices: Tensor = field(repr=False)
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    local: Local = field(default_factory=Local)
    cohort: int = 0  # clients per round; 0: all of them
    seed: int = 0
    minority: tuple[int, ...] = ()
    test: Split | None = field(default=None, repr=False)
    validation: Split | None = field(default=None, repr=False)
    auxiliary: Split | None = field(default=None, repr=False)
    roster: tuple[str, ...] | None = field(default=None, repr=False)
    counts: Tensor | None = field(default=None, repr=False)  # of each class, where the samples are elsewhere
    columns: tuple[str, ...] = field(default=(), repr=False)  # of a table: what the features are called

    def __post_init__(self) -> None:
        if self.local.augment != "none" and self.x.dim() != 4:
            raise ConfigError(
                f"local.augment = {self.local.augment!r}: it moves images, and these samples have shape"
                f" {tuple(self.x.shape[1:])}; expected none"
            )

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def eligible(self) -> Tensor:
        """The clients that have data; a partition may leave some without."""
        return (self.offsets[1:] > self.offsets[:-1]).nonzero()[:, 0]

    @cached_property
    def class_counts(self) -> Tensor:
        """Of all clients together; for reports and for tests, never for a method."""
        if self.counts is not None:
            return self.counts
        return torch.bincount(self.y[self.indices.long()], minlength=len(self.classes))

    def auxiliary_for(self, method: str) -> Split:
        """The server's own samples, for a method that has no meaning without some of every class."""
        held = 0 if self.auxiliary is None else len(self.auxiliary.y.bincount().nonzero())
        if self.auxiliary is None or held < len(self.classes):
            raise ConfigError(
                f"data.auxiliary: {method} needs samples of every class at the server, which has those of {held} of"
                f" {len(self.classes)} classes; expected a number of samples per class, such as data.auxiliary = 32"
            )
        return self.auxiliary

    def draw(self, round: int) -> Tensor:
        """A uniform cohort without replacement."""
        size = min(self.cohort or len(self.eligible), len(self.eligible))
        if size == len(self.eligible):
            return self.eligible
        return self.eligible[random.choose(self.seed, (random.SELECT, round), len(self.eligible), size)]

    def client_name(self, client: int) -> str:
        return f"{client}" if self.roster is None else f"{self.roster[client]} ({client})"

    def scale(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What turns raw samples into the model's inputs, (x + shift) * factor, by channel or by feature."""
        scale = 255.0 if self.x.dtype == torch.uint8 else 1.0
        shape = [-1] + [1] * (self.x.dim() - 2)
        factor = (1 / (torch.tensor(self.std, dtype=torch.float64) * scale)).view(shape).to(device, dtype)
        shift = (-torch.tensor(self.mean, dtype=torch.float64) * scale).view(shape).to(device, dtype)
        return shift, factor

    def features(self, device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        shift, factor = self.scale(device, dtype)
        return lambda x: (x.to(dtype) + shift) * factor


def build(
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
    minority: tuple[int, ...] | None = None,
    kind: Hashable | None = None,
) -> Federation:
    """A federation made from one pool of samples.

    The server's auxiliary samples and the validation set are cut from the pool first, balanced as the pool is; then
    the pool is made imbalanced; then it is divided among the clients. Models of the same `kind` differ in nothing but
    their numbers, and share what is compiled.
    """
    classes = len(data.classes)
    _check(classes, cohort, validation, auxiliary, minority)
    pool = np.arange(len(data.y))
    pool, held_aux = _hold_out(pool, data.y, [auxiliary] * classes, seed, 0, "auxiliary")
    share = [round(validation * n) for n in np.bincount(data.y[pool], minlength=classes)]
    pool, held_validation = _hold_out(pool, data.y, share, seed, 1, "validation")
    if imbalance is not None:
        with _about("data.imbalance"):
            pool = pool[imbalance(data.y[pool], classes, seed)]
    client = None if data.client is None else data.client[pool]
    if isinstance(partition, Natural) and data.roster is not None:
        partition = replace(partition, clients=len(data.roster))  # the imbalance may have emptied the last ones
    with _about("data.partition"):
        parts = partition(data.y[pool], classes, seed, client)
    sizes = parts.sizes
    if len(sizes) == 0:
        raise DataError("data.partition: it made no clients, expected at least one")
    clients = len(sizes)
    if isinstance(cohort, float):
        cohort = max(1, round(cohort * clients))
    if cohort is not None and not 1 <= cohort <= clients:
        raise ConfigError(f"train.cohort = {cohort}: expected 1 to {clients}, the number of clients")
    network = initialised(model, seed, kind)

    def split(rows: np.ndarray) -> Split | None:
        return Split(_tensor(data.x[rows]), _tensor(data.y[rows])) if len(rows) else None

    counts = np.bincount(data.y[pool], minlength=classes)
    fed = Federation(
        network=network,
        x=_tensor(data.x),
        y=_tensor(data.y),
        offsets=_tensor(parts.offsets.astype(np.int64)),
        indices=_tensor(pool[parts.indices]),
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
        columns=data.features,
    )  # fmt: skip
    probe = fed.features(torch.device("cpu"), torch.float32)(fed.x[:2])
    network.check(probe, classes)
    return fed


def initialised(model: Callable[[], nn.Module], seed: int, kind: Hashable | None = None) -> Network:
    """The network that a run with this seed starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(random.bits(seed, random.INIT)) & ((1 << 63) - 1))
        return Network(model(), kind)


def _tensor(array: np.ndarray) -> Tensor:
    """Without a copy, unless torch could not write to the array, which makes it warn."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


@contextmanager
def _about(table: str) -> Iterator[None]:
    """A mistake that shows only with the data at hand is one of this table all the same."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"{table}: {error}") from error


def _check(
    classes: int, cohort: float | None, validation: float, auxiliary: int, minority: tuple[int, ...] | None
) -> None:
    def need(ok: bool, name: str, value: object, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{name} = {value!r}: expected {expected}")

    if isinstance(cohort, float):
        need(0 < cohort <= 1, "train.cohort", cohort, "a share above 0 and at most 1")
    need(0 <= validation < 1, "data.validation", validation, "a number in [0, 1)")
    need(isinstance(auxiliary, int) and auxiliary >= 0, "data.auxiliary", auxiliary, "a whole number, 0 or above")
    known = all(0 <= label < classes for label in minority or ())
    need(known, "data.minority", minority, f"class numbers from 0 to {classes - 1}")


def _hold_out(
    pool: np.ndarray, y: np.ndarray, counts: list[int], seed: int, use: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Cut so many samples of each class from the pool."""
    if not any(counts):
        return pool, pool[:0]
    shuffled = pool[random.order(random.bits(seed, random.SPLIT, use), len(pool)).numpy()]
    held = []
    for label, count in enumerate(counts):
        mine = shuffled[y[shuffled] == label]
        if len(mine) < count:
            raise DataError(f"data.{name}: {count} samples of class {label} are asked for, there are {len(mine)}")
        held.append(mine[:count])
    rows = np.sort(np.concatenate(held))
    return np.setdiff1d(pool, rows, assume_unique=True), rows

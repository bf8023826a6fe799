"""Division of a pool among clients, stored as offsets and indices: a few bytes for each client.

A maker is a frozen dataclass, called as `(y, num_classes, seed, client=None)`. All are exact, seeded and
checked: no sample goes to two clients, and none is left out except where a maker says so. An empty client
is possible only where the docstring of its maker allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError
from .dirichlet import Dirichlet, DirichletClients
from .draw import Array, by_class, generator, shuffled, sort_by
from .fields import choice, real, whole
from .imbalance import class_counts
from .parts import Partition, apportion, bounds, even_size, gather

SIZES = ("equal", "lognormal", "powerlaw")


@dataclass(frozen=True)
class IID:
    """Every client draws from the same pool; sizes are equal (within one), or skewed.

    `lognormal`: sizes in proportion to exp(sigma * normal); `powerlaw`: to rank**-exponent, in random order
    of clients. Every client gets at least one sample if there are enough; otherwise some are empty.
    """

    clients: int
    sizes: str = "equal"
    sigma: float = 1.0
    exponent: float = 1.0

    def __post_init__(self) -> None:
        whole("iid: clients", self.clients, 1)
        choice("iid: sizes", self.sizes, SIZES)
        real("iid: sigma", self.sigma, 0)
        real("iid: exponent", self.exponent, 0)

    def __call__(self, y: Array, num_classes: int, seed: int, client: Array | None = None) -> Partition:
        class_counts(y, num_classes)
        sizes = _sizes(len(y), self.clients, self.sizes, self.sigma, self.exponent, seed)
        return Partition(bounds(sizes), shuffled(len(y), generator(seed, "iid"))).check(len(y))


@dataclass(frozen=True)
class LogNormal:
    """`IID` with lognormal sizes."""

    clients: int
    sigma: float = 1.0

    def __post_init__(self) -> None:
        whole("lognormal: clients", self.clients, 1)
        real("lognormal: sigma", self.sigma, 0)

    def __call__(self, y: Array, num_classes: int, seed: int, client: Array | None = None) -> Partition:
        return IID(self.clients, "lognormal", sigma=self.sigma)(y, num_classes, seed)


@dataclass(frozen=True)
class PowerLaw:
    """`IID` with power-law sizes."""

    clients: int
    exponent: float = 1.0

    def __post_init__(self) -> None:
        whole("powerlaw: clients", self.clients, 1)
        real("powerlaw: exponent", self.exponent, 0)

    def __call__(self, y: Array, num_classes: int, seed: int, client: Array | None = None) -> Partition:
        return IID(self.clients, "powerlaw", exponent=self.exponent)(y, num_classes, seed)


@dataclass(frozen=True)
class Mix:
    """CLIMB's mix: a share `alpha` of the pool is spread evenly, the rest is sorted by label and cut.

    The pool is permuted once; its first int(n * alpha) samples (rounded down to a multiple of the clients)
    are the even part. Both parts are cut into equal contiguous pieces and client i takes piece i of each.
    All clients have n // clients samples: the tail of the permuted pool, less than one sample for each
    client, is thrown away. At alpha = 0 a client holds one class, or two at a border between classes.
    """

    clients: int
    alpha: float

    def __post_init__(self) -> None:
        whole("mix: clients", self.clients, 1)
        real("mix: alpha", self.alpha, 0, 1)

    def __call__(self, y: Array, num_classes: int, seed: int, client: Array | None = None) -> Partition:
        class_counts(y, num_classes)
        each = even_size("mix", len(y), self.clients)
        even = int(len(y) * self.alpha) // self.clients
        pool = shuffled(len(y), generator(seed, "mix"))[: each * self.clients]
        head, rest = np.split(pool, [even * self.clients])
        pieces = (head.reshape(self.clients, -1), sort_by(y, rest).reshape(self.clients, -1))
        edges = np.arange(self.clients + 1, dtype=np.int64) * each
        return Partition(edges, np.concatenate(pieces, axis=1).ravel()).check(len(y))


@dataclass(frozen=True)
class Shards:
    """The pool is sorted by label and cut into shards; every client gets `per_client` of them at random.

    Samples of one class are in random order. A client's shards have the same length (within one), and sizes
    may be skewed as for `IID`, with the same rule for empty clients.
    """

    clients: int
    per_client: int = 2
    sizes: str = "equal"
    sigma: float = 1.0
    exponent: float = 1.0

    def __post_init__(self) -> None:
        whole("shards: clients", self.clients, 1)
        whole("shards: per_client", self.per_client, 1)
        choice("shards: sizes", self.sizes, SIZES)
        real("shards: sigma", self.sigma, 0)
        real("shards: exponent", self.exponent, 0)

    def __call__(self, y: Array, num_classes: int, seed: int, client: Array | None = None) -> Partition:
        class_counts(y, num_classes)
        draws = generator(seed, "shards")
        sizes = _sizes(len(y), self.clients, self.sizes, self.sigma, self.exponent, seed)
        lengths = _cut(sizes[:, None], np.arange(self.per_client), self.per_client).ravel()
        place = shuffled(len(lengths), draws)  # the order of the shards along the sorted pool
        starts = np.empty_like(lengths)
        starts[place] = bounds(lengths[place])[:-1]
        return gather(by_class(y, draws), starts, lengths, sizes).check(len(y))


@dataclass(frozen=True)
class Natural:
    """The owners that the data come with.

    `clients` is needed only where the last of them have no sample, as after an imbalance; such clients are
    empty.
    """

    clients: int | None = None

    def __post_init__(self) -> None:
        if self.clients is not None:
            whole("natural: clients", self.clients, 1)

    def __call__(self, y: Array, num_classes: int, seed: int, client: Array | None = None) -> Partition:
        class_counts(y, num_classes)
        if client is None:
            raise ConfigError(
                "natural needs to know the owner of each sample, and this data set does not say: "
                "name its client column, or choose another partition"
            )
        if client.shape != y.shape or client.dtype.kind not in "iu" or client.min() < 0:
            raise DataError(
                f"natural: clients must be whole numbers from 0, one for each of {len(y)} samples, "
                f"not {client.dtype} {list(client.shape)}"
            )
        sizes = np.bincount(client, minlength=self.clients or 0)
        if self.clients is not None and len(sizes) > self.clients:
            raise ConfigError(f"natural: clients is {self.clients}, and the data have at least {len(sizes)}")
        order = np.arange(len(y), dtype=np.int32 if len(y) < 2**31 else np.int64)
        return Partition(bounds(sizes), sort_by(client, order)).check(len(y))


PARTITIONS: dict[str, type[Any]] = {
    "iid": IID,
    "lognormal": LogNormal,
    "powerlaw": PowerLaw,
    "mix": Mix,
    "dirichlet": Dirichlet,
    "dirichlet_clients": DirichletClients,
    "shards": Shards,
    "natural": Natural,
}


def _cut(total: Array, i: Array, parts: int) -> Array:
    """Length of part i when `total` is cut into parts that differ by one at most, the longer ones first."""
    lengths: Array = total // parts + (i < total % parts)
    return lengths.astype(np.int64)


def _sizes(n: int, clients: int, kind: str, sigma: float, exponent: float, seed: int) -> Array:
    if kind == "equal":
        return _cut(np.array(n), np.arange(clients), clients)
    draws = generator(seed, "sizes")
    if kind == "lognormal":
        logs = sigma * draws.standard_normal(clients)
    else:
        logs = -exponent * np.log1p(shuffled(clients, draws))
    least = 1 if n >= clients else 0
    return least + apportion(n - least * clients, np.exp(logs - logs.max()))

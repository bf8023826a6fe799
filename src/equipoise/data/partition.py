"""Partitioners, which divide a pool of samples among clients.

A partitioner is a frozen dataclass that is called as `(y, num_classes, seed, client=None)`. Its result depends on
these arguments only and is checked: no sample goes to two clients. Unless the docstring of a partitioner says
otherwise, every sample is used and no client is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core.errors import ConfigError, DataError

from .dirichlet import Dirichlet, DirichletClients
from .draw import Array, by_class, generator, shuffled, sort_by
from .fields import choice, real, whole
from .imbalance import class_counts
from .parts import Partition, apportion, bounds, even_size, gather

SIZES = ("equal", "lognormal", "powerlaw")


@dataclass(frozen=True)
class IID:
    """Gives every client a random part of the pool.

    `sizes` is "equal" (within one sample), "lognormal" (in proportion to exp(sigma * normal)) or "powerlaw" (in
    proportion to rank**-exponent, with the ranks in random order). Every client gets at least one sample if there
    are enough; otherwise some clients are empty.
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

    The pool is permuted once; its first int(n * alpha) samples (rounded down to a multiple of the number of
    clients) are the even part. Both parts are cut into equal contiguous pieces, and client i gets piece i of each.
    Every client has n // clients samples; the n % clients samples at the end of the permuted pool are not used. At
    alpha = 0 a client holds one class, or two at a border between classes.
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
    """Sorts the pool by label, cuts it into shards, and gives every client `per_client` of them at random.

    Samples of one class are in random order. The shards of one client have the same length (within one). `sizes`
    and the rule for empty clients are those of `IID`.
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
        order = shuffled(len(lengths), draws)  # the order of the shards along the sorted pool
        starts = np.empty_like(lengths)
        starts[order] = bounds(lengths[order])[:-1]
        return gather(by_class(y, draws), starts, lengths, sizes).check(len(y))


@dataclass(frozen=True)
class Natural:
    """Uses the owners that the data come with.

    `clients` is needed only if the last clients have no samples, as may happen after an imbalance; such clients are
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
                "natural needs the owner of each sample, and this data set has none: "
                "name its client column, or choose another partition"
            )
        if client.shape != y.shape or client.dtype.kind not in "iu" or client.min() < 0:
            raise DataError(
                f"natural: clients must be whole numbers from 0, one for each of {len(y)} samples, "
                f"not {client.dtype} {list(client.shape)}"
            )
        sizes = np.bincount(client, minlength=self.clients or 0)
        if self.clients is not None and len(sizes) > self.clients:
            raise ConfigError(f"natural: clients is {self.clients}, and the data have at least {len(sizes)} clients")
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
    """Return the length of part i if `total` is cut into parts that differ by at most one, the longer ones first."""
    lengths: Array = total // parts + (i < total % parts)
    return lengths.astype(np.int64)


def _sizes(n: int, clients: int, kind: str, sigma: float, exponent: float, seed: int) -> Array:
    """Return the number of samples of each client; see `IID`."""
    if kind == "equal":
        return _cut(np.array(n), np.arange(clients), clients)
    draws = generator(seed, "sizes")
    if kind == "lognormal":
        logs = sigma * draws.standard_normal(clients)
    else:
        logs = -exponent * np.log1p(shuffled(clients, draws))
    least = 1 if n >= clients else 0
    return least + apportion(n - least * clients, np.exp(logs - logs.max()))

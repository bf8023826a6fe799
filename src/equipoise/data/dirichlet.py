"""Partitions drawn from Dirichlet distributions, class by class or client by client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equipoise.core.errors import DataError

from .draw import Array, generator
from .fields import flag, real, whole
from .imbalance import class_counts
from .parts import Partition, apportion, divide, even_size

TRIES = 1000  # how often a draw that fails is repeated at most
WORK = 10**7  # fewer tries, though at least 10, if tries x clients x classes is above this: they end within seconds


@dataclass(frozen=True)
class Dirichlet:
    """Divides the samples of each class among all clients in proportions drawn from Dir(alpha).

    With `balance`, as in the usual benchmarks, a client that already has n / clients samples gets none of the
    classes that follow. The whole draw is repeated until every client has `minimum` samples, at most 1000 times
    (fewer for very many clients). Benchmarks use a minimum of 10; the default 1 also suits small pools, and 0
    allows empty clients.
    """

    clients: int
    alpha: float
    minimum: int = 1
    balance: bool = True

    def __post_init__(self) -> None:
        whole("dirichlet: clients", self.clients, 1)
        real("dirichlet: alpha", self.alpha, 0, above=True)
        whole("dirichlet: minimum", self.minimum, 0)
        flag("dirichlet: balance", self.balance)

    def __call__(self, y: Array, num_classes: int, seed: int, client: Array | None = None) -> Partition:
        available = class_counts(y, num_classes)
        if self.clients * self.minimum > len(y):
            raise DataError(
                f"dirichlet: {self.clients} clients of at least {self.minimum} samples need "
                f"{self.clients * self.minimum}, and there are {len(y)}: use fewer clients or a lower minimum"
            )
        draws, best = generator(seed, "dirichlet"), 0
        tries = min(TRIES, max(10, WORK // (self.clients * num_classes)))
        for _ in range(tries):
            table = self._table(available, draws)
            smallest = int(table.sum(axis=1).min())
            if smallest >= self.minimum:
                return divide(y, table, draws)
            best = max(best, smallest)
        raise DataError(
            f"dirichlet: {tries} draws for {self.clients} clients at alpha = {self.alpha:g} all left some "
            f"client with fewer than {self.minimum} samples (at best {best}): use fewer clients, "
            "a larger alpha or a lower minimum"
        )

    def _table(self, available: Array, draws: np.random.Generator) -> Array:
        """Draw how many samples of each class each client gets, as an array [clients, classes]."""
        table = np.zeros((self.clients, len(available)), dtype=np.int64)
        held, even = np.zeros(self.clients, dtype=np.int64), available.sum() / self.clients
        for c, n in enumerate(available):
            shares = draws.dirichlet(np.full(self.clients, self.alpha))
            if self.balance:
                shares = np.where(held < even, shares, 0.0)
                if shares.sum() == 0:  # a tiny alpha may put everything on clients that are full
                    shares = (held < even).astype(np.float64)
            if n:
                table[:, c] = apportion(int(n), shares)
                held += table[:, c]
        return table


@dataclass(frozen=True)
class DirichletClients:
    """Gives each client n // clients samples, in class proportions that it draws from Dir(alpha).

    All clients request labels at once, drawn from their own proportions. If a class is requested more often
    than it has samples left, a random choice of the requests is served and the others are drawn again among
    the classes that remain, so that no client is favoured. The n % clients samples left over are not used.
    """

    clients: int
    alpha: float

    def __post_init__(self) -> None:
        whole("dirichlet_clients: clients", self.clients, 1)
        real("dirichlet_clients: alpha", self.alpha, 0, above=True)

    def __call__(self, y: Array, num_classes: int, seed: int, client: Array | None = None) -> Partition:
        left = class_counts(y, num_classes)
        each = even_size("dirichlet_clients", len(y), self.clients)
        draws = generator(seed, "dirichlet_clients")
        mixes = draws.dirichlet(np.full(num_classes, self.alpha), size=self.clients)
        table = np.zeros((self.clients, num_classes), dtype=np.int64)
        while (wanting := each - table.sum(axis=1)).any():  # each pass uses up a class, or is the last one
            mix = np.where(left > 0, mixes, 0.0)
            unserved = mix.sum(axis=1) < 1e-12  # the classes of this client are used up: it takes any that are left
            mix[unserved] = left
            requested = draws.multinomial(wanting, mix / mix.sum(axis=1, keepdims=True))
            for c in np.flatnonzero(requested.sum(axis=0) > left):
                requested[:, c] = draws.multivariate_hypergeometric(requested[:, c], left[c], method="marginals")
            table += requested
            left = left - requested.sum(axis=0)
        return divide(y, table, draws)

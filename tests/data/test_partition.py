"""Partitions: disjoint, complete, seeded, of the described shape, and cheap for a million clients."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from equipoise.core.errors import ConfigError, DataError
from equipoise.data import (
    IID,
    PARTITIONS,
    Dirichlet,
    DirichletClients,
    LogNormal,
    Mix,
    Natural,
    Partition,
    PowerLaw,
    Shards,
    Step,
)
from equipoise.data.parts import apportion

Y = np.random.default_rng(0).integers(0, 10, 5003)
OWNER = np.random.default_rng(1).integers(0, 17, 5003)

EXAMPLES: dict[str, list[Any]] = {
    "iid": [
        IID(17),
        IID(1),
        IID(5003),
        IID(17, "lognormal", sigma=2),
        IID(17, sizes="powerlaw", exponent=1.5),
    ],
    "lognormal": [LogNormal(17)],
    "powerlaw": [PowerLaw(17), PowerLaw(3000, exponent=2)],
    "mix": [Mix(17, 0.3), Mix(17, 0), Mix(17, 1), Mix(1, 0.5)],
    "dirichlet": [
        Dirichlet(17, 0.5, minimum=10),
        Dirichlet(17, 0.1, balance=False),
        Dirichlet(1, 1),
        Dirichlet(300, 0.01, 0),
    ],
    "dirichlet_clients": [DirichletClients(17, 0.1), DirichletClients(5000, 1), DirichletClients(17, 1e-9)],
    "shards": [Shards(17), Shards(17, 3, "powerlaw"), Shards(5003, 1), Shards(17, sizes="lognormal")],
    "natural": [Natural(), Natural(20)],
}
LEFT_OUT = {"mix", "dirichlet_clients"}  # these leave n % clients samples out, as their docstrings say


def table(partition: Partition, y: np.ndarray = Y, num_classes: int = 10) -> np.ndarray:
    """Count the samples of each client and class."""
    owner = np.repeat(np.arange(len(partition)), partition.sizes)
    counts = np.zeros((len(partition), num_classes), dtype=np.int64)
    np.add.at(counts, (owner, y[partition.indices]), 1)
    return counts


@pytest.mark.parametrize(
    ("name", "make"), [(name, make) for name, makes in EXAMPLES.items() for make in makes], ids=str
)
def test_every_partition_is_disjoint_complete_and_seeded(name: str, make: Any) -> None:
    assert type(make) is PARTITIONS[name]
    partition = make(Y, 10, 5, client=OWNER)
    n = len(Y)
    clients = make.clients or 17
    assert len(partition) == clients
    assert partition.offsets.dtype == np.int64
    assert partition.sizes.sum() == len(partition.indices)
    assert np.unique(partition.indices).size == len(partition.indices)
    assert len(partition.indices) == (n - n % clients if name in LEFT_OUT else n)
    again = make(Y, 10, 5, client=OWNER)
    assert (partition.indices == again.indices).all()
    assert (partition.offsets == again.offsets).all()
    if name != "natural":
        assert (partition.indices != make(Y, 10, 6).indices).any()
    assert eval(repr(make)) == make  # a repr is a configuration
    assert partition.client(0).tolist() == partition.indices[: partition.sizes[0]].tolist()


def test_partitions_have_every_example() -> None:
    assert set(EXAMPLES) == set(PARTITIONS)


# --- the class Partition


def test_check_refuses_invalid_partitions() -> None:
    good = Partition(np.array([0, 2, 3]), np.array([4, 0, 2]))
    assert good.check(5) is good
    assert good.over(np.array([10, 11, 12, 13, 14])).client(0).tolist() == [14, 10]
    for broken, sentence in (
        (replace(good, indices=np.array([4, 0, 4])), "two clients"),
        (replace(good, indices=np.array([5, 0, 2])), "between 0 and 4"),
        (replace(good, indices=np.array([-1, 0, 2])), "between 0 and 4"),
        (replace(good, offsets=np.array([0, 4, 3])), "not decrease"),
        (replace(good, offsets=np.array([0, 2])), "number of its indices"),
        (replace(good, offsets=np.array([0])), "number of its indices"),
    ):
        with pytest.raises(DataError, match=sentence):
            broken.check(5)
    with pytest.raises(IndexError):
        good.client(2)
    with pytest.raises(IndexError):
        good.client(-1)


def test_apportion_is_exact() -> None:
    rng = np.random.default_rng(0)
    for total in (0, 1, 999, 10**9):
        weights = rng.random(100) ** 8
        shares = apportion(total, weights)
        assert shares.sum() == total
        assert np.abs(shares - total * weights / weights.sum()).max() <= 1


# --- iid and sizes


def test_iid_sizes() -> None:
    assert set(IID(17)(Y, 10, 0).sizes.tolist()) == {294, 295}
    skewed = LogNormal(17, sigma=1.5)(Y, 10, 0).sizes
    assert skewed.min() >= 1
    assert skewed.max() > 4 * np.median(skewed)
    assert set(LogNormal(17, sigma=0)(Y, 10, 0).sizes.tolist()) <= {293, 294, 295}
    sizes = np.sort(PowerLaw(100, exponent=1)(np.zeros(100_000, np.int64), 1, 0).sizes)[::-1]
    harmonic = (1 / np.arange(1, 101)).sum()
    np.testing.assert_allclose(sizes, 1 + (100_000 - 100) / np.arange(1, 101) / harmonic, atol=1)
    assert np.argmax(PowerLaw(100)(Y, 10, 0).sizes) != np.argmax(PowerLaw(100)(Y, 10, 1).sizes)
    assert PowerLaw(4000, exponent=300)(Y, 10, 0).sizes.min() == 1
    assert IID(17, "powerlaw", exponent=2)(Y, 10, 3).sizes.tolist() == PowerLaw(17, 2)(Y, 10, 3).sizes.tolist()


def test_more_clients_than_samples_makes_empty_clients_only_where_allowed() -> None:
    y = Y[:20]
    for make in (IID(30), PowerLaw(30), LogNormal(30), Shards(30), Dirichlet(30, 1, minimum=0)):
        partition = make(y, 10, 0)
        assert (len(partition), partition.sizes.sum(), partition.sizes.min()) == (30, 20, 0)
    for make in (Mix(30, 0.5), DirichletClients(30, 1)):
        with pytest.raises(DataError, match="30 clients need at least 30 samples, and there are 20"):
            make(y, 10, 0)
    with pytest.raises(DataError, match="30 clients of at least 1 samples need 30, and there are 20"):
        Dirichlet(30, 1)(y, 10, 0)


# --- mix


@pytest.mark.parametrize(
    ("clients", "minority", "rho", "size", "holders"),
    [
        (100, (0,), 5, 460, 3),
        (100, (0,), 10, 455, 2),
        (100, (0,), 20, 452, 1),
        (500, (0,), 10, 91, 6),
        (500, (0,), 20, 90, 3),
        (100, (0, 2, 4), 10, 365, 2),
    ],
)
def test_mix_gives_the_sizes_of_climb_on_cifar10(
    clients: int, minority: tuple[int, ...], rho: int, size: int, holders: int
) -> None:
    y = np.repeat(np.arange(10), 5000)
    kept = y[Step(rho, minority)(y, 10, 0)]
    partition = Mix(clients, 0)(kept, 10, 0)
    assert set(partition.sizes.tolist()) == {size}
    counts = table(partition, kept)
    assert (counts[:, 0] > 0).sum() == holders
    assert ((counts > 0).sum(axis=1) <= 2).all()  # one class, or two at a border


def test_mix_is_even_part_then_sorted_part() -> None:
    clients, alpha = 7, 0.4
    partition = Mix(clients, alpha)(Y, 10, 2)
    each, even = len(Y) // clients, int(len(Y) * alpha) // clients
    rows = partition.indices.reshape(clients, each)
    rest = Y[rows[:, even:]].ravel()
    assert (np.diff(rest) >= 0).all()  # sorted from client to client
    head = Y[rows[:, :even]]
    assert (np.abs(head.mean(axis=1) - 4.5) < 0.6).all()  # each an even draw
    pool = np.concatenate([rows[:, :even].ravel(), rows[:, even:].ravel()])
    dropped = np.setdiff1d(np.arange(len(Y)), pool)
    assert len(dropped) == len(Y) % clients
    spread = table(Mix(clients, 1)(Y, 10, 2))
    assert np.abs(spread / spread.sum(axis=1, keepdims=True) - 0.1).max() < 0.05


# --- Dirichlet


def test_dirichlet_concentration() -> None:
    def mean_top_share(make: Any) -> float:
        counts = table(make(Y, 10, 0))
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    for kind in (Dirichlet, DirichletClients):
        assert mean_top_share(kind(20, 0.05)) > 0.5
        assert mean_top_share(kind(20, 1000.0)) < 0.2


def test_dirichlet_stops_filling_a_client_that_has_its_share() -> None:
    counts = table(Dirichlet(10, 0.3, balance=True)(Y, 10, 0))
    before = np.cumsum(counts, axis=1) - counts
    assert not counts[before >= len(Y) / 10].any()
    free = table(Dirichlet(10, 0.3, balance=False)(Y, 10, 0))
    assert free[(np.cumsum(free, axis=1) - free) >= len(Y) / 10].any()


def test_dirichlet_minimum() -> None:
    assert min(Dirichlet(20, 0.2, minimum=30)(Y, 10, seed).sizes.min() for seed in range(5)) >= 30
    with pytest.raises(DataError, match=r"100 clients of at least 51 samples need 5100, and there are 5003"):
        Dirichlet(100, 1, minimum=51)(Y, 10, 0)


def test_dirichlet_gives_up_with_advice() -> None:
    began = time.perf_counter()
    with pytest.raises(
        DataError, match=r"1000 draws for 200 clients at alpha = 0\.01 .*fewer than 20 samples \(at best \d"
    ) as error:
        Dirichlet(200, 0.01, minimum=20)(Y, 10, 0)
    assert time.perf_counter() - began < 10
    assert "use fewer clients, a larger alpha or a lower minimum" in str(error.value)


def test_clientwise_dirichlet_serves_all_clients_alike() -> None:
    y = np.repeat(np.arange(10), 600)
    counts = table(DirichletClients(60, 0.1)(y, 10, 0), y)
    assert (counts.sum(axis=1) == 100).all()
    assert (counts.sum(axis=0) == 600).all()
    skew = np.sort(counts, axis=1)[:, -1]
    early, late = skew[:30].mean(), skew[30:].mean()
    assert abs(early - late) < 15  # filling clients one after another would leave the last ones with whatever remains


def test_clientwise_dirichlet_is_fast_for_many_clients() -> None:
    y = np.random.default_rng(0).integers(0, 10, 60_000)
    began = time.perf_counter()
    partition = DirichletClients(1000, 0.3)(y, 10, 0)
    assert time.perf_counter() - began < 3
    assert set(partition.sizes.tolist()) == {60}


@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 1e6, 1e300])
def test_dirichlet_survives_extreme_concentrations(alpha: float) -> None:
    assert Dirichlet(10, alpha, minimum=0)(Y, 10, 0).sizes.sum() == len(Y)
    assert set(DirichletClients(10, alpha)(Y, 10, 0).sizes.tolist()) == {500}


# --- shards and natural


def test_shards_are_pieces_of_the_sorted_pool() -> None:
    y = np.repeat(np.arange(10), 60)[np.random.default_rng(0).permutation(600)]
    counts = table(Shards(30, per_client=2)(y, 10, 0), y)  # 60 shards of 10 samples, each within one class
    assert (counts % 10 == 0).all()
    assert (counts.sum(axis=1) == 20).all()
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert len({tuple(row) for row in counts.tolist()}) > 10


def test_skewed_shards() -> None:
    counts = table(Shards(20, 2, sizes="powerlaw")(Y, 10, 0))
    sizes = counts.sum(axis=1)
    assert sizes.max() > 5 * np.median(sizes)
    assert ((counts[sizes < 100] > 0).sum(axis=1) <= 4).all()


def test_natural_follows_the_owners() -> None:
    partition = Natural(20)(Y, 10, 0, client=OWNER)
    for i in range(20):
        assert partition.client(i).tolist() == np.flatnonzero(i == OWNER).tolist()
    assert partition.sizes[17:].tolist() == [0, 0, 0]
    with pytest.raises(ConfigError, match="name its client column"):
        Natural()(Y, 10, 0)
    with pytest.raises(ConfigError, match="clients is 5, and the data have at least 17"):
        Natural(5)(Y, 10, 0, client=OWNER)
    with pytest.raises(DataError, match="one for each of 5003 samples"):
        Natural()(Y, 10, 0, client=OWNER[:10])
    with pytest.raises(DataError, match="whole numbers from 0"):
        Natural()(Y, 10, 0, client=OWNER - 1)


# --- settings


@pytest.mark.parametrize("kind", [kind for kind in PARTITIONS.values() if kind is not Natural])
@pytest.mark.parametrize("clients", [0, -3, 2.5, "ten", True])
def test_clients_must_be_a_positive_whole_number(kind: Callable[..., object], clients: object) -> None:
    options = {"alpha": 0.5} if kind in (Mix, Dirichlet, DirichletClients) else {}
    with pytest.raises(ConfigError, match=rf"clients must be a whole number of at least 1, not {clients!r}"):
        kind(clients, **options)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Mix(10, 1.1), r"mix: alpha must be a number of at least 0 and at most 1, not 1\.1"),
        (lambda: Mix(10, -0.1), "mix: alpha"),
        (lambda: Mix(10, float("nan")), "mix: alpha .* not nan"),
        (lambda: Dirichlet(10, 0), "dirichlet: alpha must be a number above 0, not 0"),
        (lambda: Dirichlet(10, float("inf")), "not inf"),
        (lambda: Dirichlet(10, 1, minimum=-1), "dirichlet: minimum"),
        (lambda: Dirichlet(10, 1, balance="no"), "dirichlet: balance must be true or false"),  # type: ignore[arg-type]
        (lambda: DirichletClients(10, -1), "dirichlet_clients: alpha"),
        (lambda: IID(10, "powerlw"), "did you mean 'powerlaw'"),
        (lambda: IID(10, sigma=-1), "iid: sigma"),
        (lambda: PowerLaw(10, exponent=-1), "powerlaw: exponent"),
        (lambda: LogNormal(10, sigma=float("nan")), "lognormal: sigma"),
        (lambda: Shards(10, 0), "shards: per_client must be a whole number of at least 1, not 0"),
        (lambda: Natural(0), "natural: clients"),
    ],
)
def test_bad_settings_get_one_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


@pytest.mark.parametrize("name", PARTITIONS)
def test_labels_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="label 9 of sample"):
        EXAMPLES[name][0](np.sort(Y), 9, 0, client=OWNER)


# --- a million clients


@pytest.mark.parametrize("name", ["iid", "shards", "powerlaw"])
def test_ten_million_samples_among_a_million_clients(name: str) -> None:
    y = np.random.default_rng(0).integers(0, 10, 10_000_000, dtype=np.int64)
    tracemalloc.start()
    try:
        began = time.perf_counter()
        partition = PARTITIONS[name](1_000_000)(y, 10, 0)
        seconds = time.perf_counter() - began
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < 10
    assert peak < 2**30
    assert partition.sizes.sum() == 10_000_000
    assert partition.sizes.min() >= 1
    assert partition.offsets.nbytes + partition.indices.nbytes < 64 * 1_000_000

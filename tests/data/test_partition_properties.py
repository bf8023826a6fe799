"""Laws of partitions: no sample has two owners, none is lost, sizes are as asked, and the seed decides everything."""

from __future__ import annotations

import math
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

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
)
from equipoise.data.partition import SIZES
from equipoise.data.parts import apportion
from tests.strategies import SEEDS, pools

CLIENTS = st.integers(1, 60)
SPREADS = st.floats(0, 10) | st.sampled_from([0, 1, 1000.0, 1e300])
ALPHAS = st.floats(1e-3, 10) | st.sampled_from([1e-300, 1e-9, 1e9, 1e300, 1])
MAKERS: dict[str, st.SearchStrategy[Any]] = {
    "iid": st.builds(IID, CLIENTS, st.sampled_from(SIZES), SPREADS, SPREADS),
    "lognormal": st.builds(LogNormal, CLIENTS, SPREADS),
    "powerlaw": st.builds(PowerLaw, CLIENTS, SPREADS),
    "mix": st.builds(Mix, CLIENTS, st.floats(0, 1)),
    "dirichlet": st.builds(Dirichlet, CLIENTS, ALPHAS, st.integers(0, 3), st.booleans()),
    "dirichlet_clients": st.builds(DirichletClients, CLIENTS, ALPHAS),
    "shards": st.builds(Shards, CLIENTS, st.integers(1, 5), st.sampled_from(SIZES), SPREADS, SPREADS),
    "natural": st.builds(Natural, st.none() | st.integers(20, 80)),
}
EQUAL = {"mix", "dirichlet_clients"}  # all clients have n // clients samples, and n % clients are left out
EVERY = pytest.mark.parametrize("name", PARTITIONS)


def owners(y: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return an owner for each sample, as data that come with owners have them."""
    return np.random.default_rng(seed).integers(0, 20, len(y))


def made(maker: Any, y: np.ndarray, num_classes: int, seed: int) -> Partition:
    """Return the partition, or drop the example where the pool is too small for what is asked."""
    try:
        partition: Partition = maker(y, num_classes, seed, owners(y))
    except DataError:
        assume(False)
    return partition


def test_every_partition_is_tried() -> None:
    assert MAKERS.keys() == PARTITIONS.keys()


@EVERY
@given(data=st.data(), pool=pools(), seed=SEEDS)
def test_every_sample_has_one_owner_and_none_is_lost(
    name: str, data: st.DataObject, pool: tuple[np.ndarray, int], seed: int
) -> None:
    y, num_classes = pool
    before = y.copy()
    maker = data.draw(MAKERS[name])
    partition = made(maker, y, num_classes, seed)
    n = len(y)
    clients = maker.clients if maker.clients is not None else owners(y).max() + 1
    assert len(partition) == clients == len(partition.sizes)
    assert int(partition.offsets[0]) == 0
    assert int(partition.offsets[-1]) == len(partition.indices)
    assert (partition.sizes >= 0).all()
    drawn = partition.indices.tolist()
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) <= set(range(n))
    assert len(drawn) == (n - n % clients if name in EQUAL else n)
    parts = [partition.client(i).tolist() for i in range(clients)]
    assert [len(part) for part in parts] == partition.sizes.tolist()
    assert list(chain.from_iterable(parts)) == drawn
    np.testing.assert_array_equal(y, before)  # the labels are read only


@EVERY
@given(data=st.data(), pool=pools(), seed=SEEDS)
def test_sizes_are_as_asked(name: str, data: st.DataObject, pool: tuple[np.ndarray, int], seed: int) -> None:
    y, num_classes = pool
    maker, n = data.draw(MAKERS[name]), len(y)
    sizes = made(maker, y, num_classes, seed).sizes
    if name in EQUAL:
        assert (sizes == n // maker.clients).all()
    elif name == "natural":
        assert sizes.tolist() == np.bincount(owners(y), minlength=maker.clients or 0).tolist()
    elif name == "dirichlet":
        assert sizes.min() >= maker.minimum
    else:
        kind = getattr(maker, "sizes", name)
        if kind == "equal":
            assert sizes.max() - sizes.min() <= 1
        assert sizes.min() >= (1 if n >= maker.clients else 0)
        if kind == "powerlaw":  # sizes fall as rank**-exponent does: the largest is the first share, within one
            shares = np.arange(1, maker.clients + 1) ** -min(float(maker.exponent), 100.0)
            free = n - maker.clients if n >= maker.clients else n
            assert abs(sizes.max() - (n >= maker.clients) - free * shares[0] / shares.sum()) <= 1


@EVERY
@given(data=st.data(), pool=pools(), seed=st.integers(0, 2**63))
def test_the_seed_decides(name: str, data: st.DataObject, pool: tuple[np.ndarray, int], seed: int) -> None:
    y, num_classes = pool
    maker = data.draw(MAKERS[name])
    one, again = made(maker, y, num_classes, seed), made(maker, y, num_classes, seed)
    np.testing.assert_array_equal(one.offsets, again.offsets)
    np.testing.assert_array_equal(one.indices, again.indices)
    other = made(maker, y, num_classes, seed + 1)
    same = one.indices.tolist() == other.indices.tolist()
    if name == "natural":
        assert same  # there is nothing to draw
    elif name in ("iid", "lognormal", "powerlaw"):
        assert not same or len(y) < 25  # 25! orders
    else:  # the order within a class is always drawn
        assert not same or np.bincount(y.astype(np.int64)).max() < 25 or len(one.indices) < 25


@given(st.data(), pools(most=300), SEEDS)
def test_mix_at_zero_cuts_the_sorted_pool(data: st.DataObject, pool: tuple[np.ndarray, int], seed: int) -> None:
    """A client then holds consecutive labels: no label of another client lies between two of its own."""
    y, num_classes = pool
    clients = data.draw(st.integers(1, len(y)))
    partition = Mix(clients, 0.0)(y, num_classes, seed)
    labels = [y[partition.client(i)] for i in range(clients)]
    for before, after in pairwise(labels):
        assert before.max() <= after.min()


@given(st.data(), pools(most=300), SEEDS)
def test_a_client_of_shards_has_few_classes(data: st.DataObject, pool: tuple[np.ndarray, int], seed: int) -> None:
    """A shard of k samples meets one class more than the borders between classes that it crosses."""
    y, num_classes = pool
    clients, per_client = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 4))
    partition = Shards(clients, per_client)(y, num_classes, seed)
    crossed = sum(len(np.unique(y[partition.client(i)])) for i in range(clients))
    assert crossed <= clients * per_client + num_classes - 1


@given(pools(most=300), CLIENTS, SEEDS)
def test_with_balance_a_client_that_has_its_even_share_takes_no_further_class(
    pool: tuple[np.ndarray, int], clients: int, seed: int
) -> None:
    y, num_classes = pool
    partition = Dirichlet(clients, 0.3, minimum=0)(y, num_classes, seed)
    for i in range(clients):
        labels = y[partition.client(i)]
        if len(labels):
            assert np.count_nonzero(labels < labels.max()) < len(y) / clients


@given(st.integers(0, 10**6), st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_apportion_is_exact_and_within_one_of_each_share(total: int, weights: list[float]) -> None:
    assume(sum(weights) > 1e-6)
    parts = apportion(total, np.array(weights))
    assert int(parts.sum()) == total
    assert (parts >= 0).all()
    shares = total * np.array(weights) / math.fsum(weights)
    assert (np.abs(parts - shares) <= 1 + 1e-6).all()
    assert not parts[np.array(weights) == 0].any()


NUMBER = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400)


@EVERY
@given(data=st.data(), pool=pools(most=30), seed=SEEDS)
@settings(max_examples=80)
def test_wrong_settings_and_labels_raise_nothing_but_our_errors(
    name: str, data: st.DataObject, pool: tuple[np.ndarray, int], seed: int
) -> None:
    """A number of clients is kept small, since each client costs memory, as it must."""
    kind = PARTITIONS[name]
    small = st.integers(-2, 60) | st.booleans() | st.floats() | st.none() | st.text(max_size=2)
    given_settings = {
        field: data.draw(small if field in ("clients", "per_client", "minimum") else NUMBER)
        for field in kind.__dataclass_fields__
        if data.draw(st.integers(0, 2)) or field in ("clients", "alpha")
    }
    y, num_classes = pool
    labels = data.draw(
        st.sampled_from([y, y[:0], y.astype(np.float32), y.astype(np.int64) - 1, y.astype(np.int64) + 3])
    )
    client = data.draw(
        st.sampled_from([None, owners(y), owners(y)[:-1], owners(y) - 5, owners(y).astype(np.float64)])
    )
    try:
        partition = kind(**given_settings)(labels, num_classes, seed, client)
    except (ConfigError, DataError) as error:
        sentence = str(error)
    else:
        assert partition.check(len(labels)) is partition
        return
    assert sentence
    assert "\n" not in sentence

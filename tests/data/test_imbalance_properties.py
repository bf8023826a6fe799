"""Laws of imbalances: what is kept was there, class counts are as asked, and a stronger one keeps a subset."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from equipoise.core.errors import ConfigError, DataError
from equipoise.data import Step
from equipoise.data.imbalance import (
    EMNIST_CLASSES,
    ENGLISH,
    IMBALANCES,
    UPPER,
    Counts,
    HalfNormal,
    Letters,
    Linear,
    LongTail,
    Unchanged,
    Zipf,
    minority,
)
from tests.strategies import SEEDS, pools

Pool = tuple[np.ndarray, int]
CLASSES = 6
POOLS = pools(classes=CLASSES)
ORDERS = st.none() | st.permutations(range(CLASSES)).map(tuple)
RATIOS = st.floats(1, 200) | st.sampled_from([1, 1e300])
RARE = st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=4, unique=True).map(tuple)
MAKERS: dict[str, st.SearchStrategy[Any]] = {
    "none": st.builds(Unchanged),
    "step": st.builds(Step, RATIOS, RARE, st.booleans()),
    "longtail": st.builds(LongTail, st.floats(0.005, 200) | st.sampled_from([1e-310, 1e308]), ORDERS),
    "halfnormal": st.builds(HalfNormal, st.floats(0.01, 10) | st.sampled_from([1e-200, 1e300]), ORDERS),
    "zipf": st.builds(Zipf, st.floats(0, 5) | st.sampled_from([1000, 1074.0, 1e300]), ORDERS),
    "linear": st.builds(Linear, RATIOS, ORDERS),
    "counts": st.builds(Counts, st.dictionaries(st.integers(0, CLASSES - 1), st.integers(0, 5))),
}
EVERY = pytest.mark.parametrize("name", MAKERS)


def counted(y: np.ndarray, num_classes: int = CLASSES) -> list[int]:
    return [int((y == c).sum()) for c in range(num_classes)]


def kept_by(maker: Any, pool: Pool, seed: int) -> np.ndarray:
    """Return what is kept, or drop the example where a class has fewer samples than are asked for."""
    y, num_classes = pool
    try:
        kept: np.ndarray = maker(y, num_classes, seed)
    except DataError:
        assume(False)
    return kept


def test_every_imbalance_is_tried() -> None:
    assert {*MAKERS, "letters"} == IMBALANCES.keys()  # letters has properties of its own below


@EVERY
@given(data=st.data(), pool=POOLS, seed=SEEDS)
def test_what_is_kept_was_there_in_file_order(name: str, data: st.DataObject, pool: Pool, seed: int) -> None:
    y, _ = pool
    before, maker = y.copy(), data.draw(MAKERS[name])
    kept = kept_by(maker, pool, seed)
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert set(kept.tolist()) <= set(range(len(y)))
    assert len(kept) > 0 or (name == "step" and maker.joint)
    np.testing.assert_array_equal(y, before)
    np.testing.assert_array_equal(maker(y, CLASSES, seed), kept)
    if name not in ("counts", "step"):  # no class that has samples loses all of them
        assert [n > 0 for n in counted(y[kept])] == [n > 0 for n in counted(y)]


@EVERY
@given(data=st.data(), pool=pools(most=400, classes=CLASSES), seed=st.integers(0, 2**63))
def test_another_seed_keeps_others_of_the_same_classes(name: str, data: st.DataObject, pool: Pool, seed: int) -> None:
    y, _ = pool
    maker = data.draw(MAKERS[name])
    one, other = kept_by(maker, pool, seed), kept_by(maker, pool, seed + 1)
    assert counted(y[one]) == counted(y[other])
    choices = math.prod(math.comb(n, k) for n, k in zip(counted(y), counted(y[one]), strict=True))
    if choices == 1 or (name == "step" and maker.joint):  # a joint step takes the first in file order
        np.testing.assert_array_equal(one, other)
    elif choices > 10**12:
        assert one.tolist() != other.tolist()


def half_up(number: Fraction) -> int:
    return math.floor(number + Fraction(1, 2))


@given(st.integers(1, 20), RARE, st.booleans(), POOLS, SEEDS)
def test_a_step_keeps_one_in_rho(rho: int, rare: tuple[int, ...], joint: bool, pool: Pool, seed: int) -> None:
    y, _ = pool
    all_there, kept = counted(y), counted(y[Step(rho, rare, joint)(y, CLASSES, seed)])
    if joint:
        assert sum(kept[c] for c in rare) == sum(all_there[c] for c in rare) // rho
    for c in range(CLASSES):
        if c not in rare:
            assert kept[c] == all_there[c]
        elif not joint:
            assert kept[c] == (max(1, half_up(Fraction(all_there[c], rho))) if all_there[c] else 0)


@given(st.floats(1, 50), st.floats(1, 50), RARE, POOLS, SEEDS)
def test_a_stronger_step_keeps_a_subset(
    weak: float, strong: float, rare: tuple[int, ...], pool: Pool, seed: int
) -> None:
    weak, strong = sorted((weak, strong))
    for joint in (False, True):
        kept, fewer = (set(Step(rho, rare, joint)(*pool, seed).tolist()) for rho in (weak, strong))
        assert fewer <= kept


def shape_of(maker: Any) -> list[float]:
    """Return how many samples each place of a curve keeps for one of the first place, from the docstrings."""
    places = range(CLASSES)
    if isinstance(maker, LongTail):
        return [maker.factor ** (-c / (CLASSES - 1)) for c in places]
    if isinstance(maker, HalfNormal):
        return [math.exp(-((c / maker.scale) ** 2) / 2) for c in places]
    if isinstance(maker, Zipf):
        return [(c + 1) ** -maker.exponent for c in places]
    return [1 - c / (CLASSES - 1) * (1 - 1 / maker.ratio) for c in places]


@pytest.mark.parametrize(
    ("kind", "settings_of_it"),
    [
        (LongTail, st.floats(0.005, 200)),
        (HalfNormal, st.floats(0.5, 10)),
        (Zipf, st.floats(0, 5)),
        (Linear, st.floats(1, 200)),
    ],
)
@given(data=st.data(), pool=pools(most=2000, classes=CLASSES), seed=SEEDS)
def test_a_curve_has_its_shape_and_uses_up_a_class(
    kind: type, settings_of_it: st.SearchStrategy[float], data: st.DataObject, pool: Pool, seed: int
) -> None:
    maker = kind(data.draw(settings_of_it), data.draw(ORDERS))
    y, _ = pool
    available, kept = counted(y), counted(y[maker(y, CLASSES, seed)])
    weights = dict(zip(maker.order or range(CLASSES), shape_of(maker), strict=True))
    largest = min(available[c] / weights[c] for c in weights if available[c])
    assert any(kept[c] == available[c] > 0 for c in weights)
    for c, weight in weights.items():
        if available[c] == 0:
            assert kept[c] == 0
        elif kept[c] != 1:
            assert abs(kept[c] - largest * weight) <= 0.5 + 1e-6
        else:
            assert largest * weight <= 1.5 + 1e-6


@given(st.sampled_from([HalfNormal(0.01), HalfNormal(1e-200), Zipf(1e300), Zipf(1074), Linear(1e308)]), SEEDS)
def test_a_curve_below_the_smallest_float_keeps_one_of_each_class(maker: Any, seed: int) -> None:
    """The first class, which alone has a share that is not zero, has no samples here."""
    y = np.repeat(np.arange(1, CLASSES), 8)
    kept = counted(y[maker(y, CLASSES, seed)])
    assert kept[0] == 0
    assert kept[-1] == 1 or isinstance(maker, Linear)
    assert all(1 <= n <= 8 for n in kept[1:])


@given(st.data(), POOLS, SEEDS)
def test_counts_are_exact_or_refused(data: st.DataObject, pool: Pool, seed: int) -> None:
    y, _ = pool
    available = counted(y)
    wanted = [data.draw(st.integers(0, n + 1) | st.just(n) | st.just(10**30)) for n in available]
    named = data.draw(st.booleans())
    maker = Counts(dict(enumerate(wanted)) if named else tuple(wanted))
    if any(n > there for n, there in zip(wanted, available, strict=True)):
        with pytest.raises(DataError, match="counts asks for"):
            maker(y, CLASSES, seed)
    elif not any(wanted):
        with pytest.raises(DataError, match="keeps no sample at all"):
            maker(y, CLASSES, seed)
    else:
        assert counted(y[maker(y, CLASSES, seed)]) == wanted


@given(st.sampled_from([26, 47, 62]), st.integers(1, 5000), st.integers(0, 99), SEEDS)
@settings(max_examples=40)
def test_letters_are_as_frequent_as_in_text(classes: int, total: int, drawn: int, seed: int) -> None:
    y = np.random.default_rng(drawn).permutation(np.repeat(np.arange(classes), 40))
    kept = counted(y[Letters(total)(y, classes, seed)], classes)
    assert all(1 <= n <= 40 for n in kept)
    curve = counted(y[Letters()(y, classes, seed)], classes)
    assert max(curve) == 40
    names = EMNIST_CLASSES[classes]
    percent = dict(zip(UPPER, ENGLISH, strict=True))
    cases = names.upper().count  # a letter with two classes gives half of its frequency to each
    weights = [percent[c.upper()] / sum(ENGLISH) / cases(c.upper()) if c.isalpha() else 1 / 26 for c in names]
    for n, whole_curve, weight in zip(kept, curve, weights, strict=True):
        assert abs(n - min(max(total * weight / sum(weights), 1), 40)) <= 0.5 + 1e-6
        assert abs(whole_curve - max(40 * weight / max(weights), 1)) <= 0.5 + 1e-6


@given(st.lists(st.integers(0, 1000), max_size=12))
def test_the_minority_has_less_than_half_the_mean(counts: list[int]) -> None:
    rare = minority(counts)
    assert rare == [c for c, n in enumerate(counts) if 2 * n * len(counts) < sum(counts)]


ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(-1, 7), max_size=7)
    | st.dictionaries(st.integers(-1, 7) | st.text("01a", max_size=2), st.integers(-1, 9), max_size=4)
    | st.just(10**400)
)


@pytest.mark.parametrize("name", IMBALANCES)
@given(data=st.data(), pool=pools(most=30, classes=CLASSES), seed=SEEDS)
@settings(max_examples=80)
def test_wrong_settings_and_labels_raise_nothing_but_our_errors(
    name: str, data: st.DataObject, pool: Pool, seed: int
) -> None:
    kind = IMBALANCES[name]
    # A total of more than any file has samples is no mistake, but a float must be able to hold it.
    given_settings = {
        field: data.draw(ANYTHING if field != "total" else st.integers(-1, 2**80) | st.floats() | st.text(max_size=2))
        for field in kind.__dataclass_fields__
        if data.draw(st.integers(0, 2)) or field in ("rho", "factor", "scale", "exponent", "ratio", "counts")
    }
    y, classes = pool
    labels = data.draw(st.sampled_from([y, y[:0], y.astype(np.float32), y.astype(np.int64) - 1]))
    try:
        kept = kind(**given_settings)(labels, data.draw(st.sampled_from([classes, 26, 1])), seed)
    except (ConfigError, DataError) as error:
        sentence = str(error)
    else:
        assert len(set(kept.tolist())) == len(kept) <= len(labels)
        return
    assert sentence
    assert "\n" not in sentence


@given(pools())
@example((np.array([3]), 3))
def test_labels_outside_the_classes_are_named(pool: Pool) -> None:
    y, num_classes = pool
    with pytest.raises(DataError, match="is outside 0 to"):
        Unchanged()(np.append(y, num_classes).astype(np.int64), num_classes, 0)

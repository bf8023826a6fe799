"""Imbalances: exact counts, and draws that depend on the seed only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from equipoise.core.errors import ConfigError, DataError
from equipoise.data import IMBALANCES, Counts, HalfNormal, Letters, Linear, LongTail, Step, Unchanged, Zipf, minority
from equipoise.data.imbalance import EMNIST_CLASSES, ENGLISH

CIFAR = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 500))
MNIST = np.repeat(np.arange(10), [592, 674, 595, 613, 584, 542, 591, 626, 585, 594])

EXAMPLES: dict[str, Any] = {
    "none": Unchanged(),
    "step": Step(10, (0, 2)),
    "longtail": LongTail(50),
    "halfnormal": HalfNormal(3),
    "zipf": Zipf(1.2),
    "linear": Linear(10),
    "letters": Letters(),
    "counts": Counts({1: 7}),
}


def kept(imbalance: Any, y: np.ndarray = CIFAR, num_classes: int = 10, seed: int = 0) -> list[int]:
    return np.bincount(y[imbalance(y, num_classes, seed)], minlength=num_classes).tolist()


@pytest.mark.parametrize("name", IMBALANCES)
def test_every_imbalance_keeps_distinct_samples_in_file_order_by_seed(name: str) -> None:
    imbalance = EXAMPLES[name]
    assert type(imbalance) is IMBALANCES[name]
    y, num_classes = (CIFAR, 10) if name != "letters" else (np.repeat(np.arange(26), 300), 26)
    first = imbalance(y, num_classes, 3)
    assert first.dtype == np.int64
    assert (np.diff(first) > 0).all()
    assert first.min() >= 0
    assert first.max() < len(y)
    assert first.tolist() == imbalance(y, num_classes, 3).tolist()
    if name != "none":
        assert first.tolist() != imbalance(y, num_classes, 4).tolist()
    assert eval(repr(imbalance)) == imbalance  # a repr is a configuration


@pytest.mark.parametrize("name", IMBALANCES)
def test_labels_out_of_range_are_refused(name: str) -> None:
    num_classes = 26 if name == "letters" else 10
    with pytest.raises(DataError, match=f"label {num_classes} of sample 1 is outside 0 to {num_classes - 1}"):
        EXAMPLES[name](np.array([0, num_classes]), num_classes, 0)
    with pytest.raises(DataError, match="labels must be integers"):
        EXAMPLES[name](np.array([0.0, 1.0]), num_classes, 0)
    with pytest.raises(DataError, match="no samples"):
        EXAMPLES[name](np.zeros(0, np.int64), num_classes, 0)


def test_none_keeps_everything() -> None:
    assert Unchanged()(CIFAR, 10, 0).tolist() == list(range(5000))


def test_step_per_class() -> None:
    assert kept(Step(10, (0, 2, 4))) == [50, 500, 50, 500, 50, 500, 500, 500, 500, 500]
    assert kept(Step(3, (0,)))[0] == 167  # 166.67
    assert kept(Step(10_000, (0,)))[0] == 1  # never below one
    assert kept(Step(1)) == [500] * 10


def test_step_jointly_takes_the_first_samples_of_the_union() -> None:
    indices = Step(8, (0, 2, 4), joint=True)(CIFAR, 10, seed=9)
    union = np.flatnonzero(np.isin(CIFAR, [0, 2, 4]))
    expected = np.sort(np.concatenate([union[: int(1500 / 8)], np.flatnonzero(~np.isin(CIFAR, [0, 2, 4]))]))
    assert indices.tolist() == expected.tolist()
    assert indices.tolist() == Step(8, (0, 2, 4), joint=True)(CIFAR, 10, seed=1).tolist()


def test_a_stronger_step_keeps_a_subset_of_a_weaker_one() -> None:
    weak, strong = (set(Step(rho)(CIFAR, 10, 7).tolist()) for rho in (5, 50))
    assert strong < weak


def test_longtail_is_exponential_and_reads_both_spellings() -> None:
    expected = [round(500 * 100 ** (-c / 9)) for c in range(10)]
    assert kept(LongTail(100)) == expected
    assert LongTail(0.01) == LongTail(100)
    assert kept(LongTail(100, order=tuple(range(9, -1, -1)))) == expected[::-1]
    assert kept(LongTail(1)) == [500] * 10


@pytest.mark.parametrize(
    ("imbalance", "curve"),
    [
        (LongTail(20), lambda c: 20 ** (-c / 9)),
        (HalfNormal(4), lambda c: np.exp(-c * c / 32)),
        (Zipf(0.7), lambda c: (c + 1) ** -0.7),
        (Linear(5), lambda c: 1 - c / 9 * 0.8),
    ],
)
def test_curves_keep_their_shape_on_uneven_pools(imbalance: Any, curve: Callable[[float], float]) -> None:
    counts = np.array(kept(imbalance, MNIST))
    weights = np.array([curve(float(c)) for c in range(10)])
    available = np.bincount(MNIST)
    n_max = (available / weights).min()
    assert np.abs(counts - n_max * weights).max() <= 0.5
    assert (counts == available).any()  # as many samples as the shape allows


def test_extreme_curves_leave_one_sample_and_absent_classes_stay_absent() -> None:
    assert kept(Zipf(5000)) == [500] + [1] * 9
    assert kept(HalfNormal(0.001)) == [500] + [1] * 9
    y = CIFAR[CIFAR != 3]
    counts = kept(LongTail(10), y)
    assert counts[3] == 0
    assert counts[0] == 500


@pytest.mark.parametrize("num_classes", [26, 47, 62])
def test_letters_follow_english(num_classes: int) -> None:
    y = np.repeat(np.arange(num_classes), 4000)
    names = EMNIST_CLASSES[num_classes]
    assert len(names) == num_classes
    counts = dict(zip(names, kept(Letters(), y, num_classes), strict=True))
    per_letter = {u: counts[u] + (counts.get(u.lower(), 0)) for u in EMNIST_CLASSES[26]}
    share = np.array(list(per_letter.values())) / sum(per_letter.values())
    np.testing.assert_allclose(share, np.array(ENGLISH) / sum(ENGLISH), atol=2e-3)
    if num_classes > 26:
        assert {counts[d] for d in "0123456789"} == {counts["0"]}
        assert counts["0"] == pytest.approx(sum(per_letter.values()) / 26, rel=0.01)


def test_letters_with_a_total() -> None:
    y = np.repeat(np.arange(26), 4000)
    assert sum(kept(Letters(total=20000), y, 26)) == pytest.approx(20000, abs=13)
    capped = kept(Letters(total=60000), y, 26)
    assert capped[4] == 4000  # e would have 7,621
    assert capped[25] == round(60000 * ENGLISH[25] / sum(ENGLISH))
    with pytest.raises(ConfigError, match="26, 47 or 62 classes of EMNIST, and this data set has 10"):
        Letters()(CIFAR, 10, 0)


def test_counts() -> None:
    assert kept(Counts([5, 0, 500, 1, 2, 3, 4, 5, 6, 7])) == [5, 0, 500, 1, 2, 3, 4, 5, 6, 7]
    assert kept(Counts({"3": 20})) == [
        500,
        500,
        500,
        20,
        500,
        500,
        500,
        500,
        500,
        500,
    ]  # keys of a TOML table
    with pytest.raises(DataError, match="asks for 501 samples of class 2, which has 500"):
        Counts({2: 501})(CIFAR, 10, 0)
    with pytest.raises(ConfigError, match="3 numbers for 10 classes"):
        Counts([1, 2, 3])(CIFAR, 10, 0)
    with pytest.raises(ConfigError, match="names class 10, and the classes are 0 to 9"):
        Counts({10: 1})(CIFAR, 10, 0)
    with pytest.raises(DataError, match="no sample at all"):
        Counts([0] * 10)(CIFAR, 10, 0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Step(0.5), r"step: rho must be a number of at least 1, not 0\.5"),
        (lambda: Step(float("nan")), "step: rho .* not nan"),
        (lambda: Step("10"), "step: rho .* not '10'"),  # type: ignore[arg-type]
        (lambda: Step(10, ()), "at least one class"),
        (lambda: Step(10, (1, 1)), "names a class twice"),
        (lambda: Step(10, (-1,)), "whole number of at least 0, not -1"),
        (lambda: Step(10, (0.5,)), r"not 0\.5"),  # type: ignore[arg-type]
        (lambda: Step(10, 3), "must be a list of class numbers, not 3"),  # type: ignore[arg-type]
        (lambda: Step(10, joint=1), "joint must be true or false, not 1"),  # type: ignore[arg-type]
        (lambda: Step(10, (10,))(CIFAR, 10, 0), "names class 10, and the classes are 0 to 9"),
        (lambda: LongTail(0), "longtail: factor must be a number above 0, not 0"),
        (lambda: LongTail(10, (0, 1))(CIFAR, 10, 0), "each of the 10 classes once"),
        (lambda: HalfNormal(-1), "halfnormal: scale"),
        (lambda: Zipf(-0.1), "zipf: exponent"),
        (lambda: Linear(0.9), "linear: ratio"),
        (lambda: Letters(total=0), "letters: total"),
        (lambda: Letters(digit=0), "letters: digit"),
        (lambda: Counts("12"), "list of numbers or a table"),  # type: ignore[arg-type]
        (lambda: Counts([1, -2]), "counts: class 1 must be a whole number of at least 0, not -2"),
        (lambda: Counts({"cat": 1}), "not 'cat'"),  # type: ignore[dict-item]
    ],
)
def test_bad_settings_get_one_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_minority_is_below_half_the_mean() -> None:
    assert minority([100, 100, 100, 10]) == [3]
    assert minority(np.array([100, 100, 100, 100])) == []
    assert minority([3, 1]) == []  # exactly half the mean is not below it
    assert minority([5, 5, 0]) == [2]

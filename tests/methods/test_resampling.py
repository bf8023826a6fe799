from __future__ import annotations

import math

import pytest
import torch

from equipoise.core import random
from equipoise.methods.shared.resampling import ONE, multiply, zscore_ratios

COUNTS = torch.tensor([30, 40, 35, 25, 5, 30, 45, 20, 10, 900, 0, 33, 28, 31])
TAU = 2.0


def as_floats(counts: torch.Tensor, sign: str = "plus") -> list[float]:
    return (zscore_ratios(counts, TAU, sign).double() / ONE).tolist()  # type: ignore[arg-type]


def test_ratios_follow_algorithm_2() -> None:
    mu = float(COUNTS.double().mean())
    sigma = math.sqrt(sum((c - mu) ** 2 for c in COUNTS.tolist()) / len(COUNTS))
    for c, ratio in zip(COUNTS.tolist(), as_floats(COUNTS), strict=True):
        z = (c - mu) / sigma
        if c == 0:
            want = 1.0
        elif z < -1 / TAU:
            want = (mu + sigma * math.sqrt(abs(z * TAU))) / c
        elif z > TAU:
            want = (mu + sigma * math.sqrt(z * TAU)) / c
        else:
            want = 1.0
        assert ratio == pytest.approx(want, abs=2 / ONE)


def test_a_class_far_above_the_mean_shrinks_towards_its_threshold() -> None:
    mu, sigma = float(COUNTS.double().mean()), float(COUNTS.double().std(correction=0))
    size = as_floats(COUNTS)[9] * 900
    assert mu + TAU * sigma < size < 900


def test_augmented_classes_end_above_the_mean_as_printed_and_below_the_threshold_with_minus() -> None:
    counts = torch.tensor([100, 100, 100, 20])
    mu, sigma = 80.0, float(counts.double().std(correction=0))
    assert as_floats(counts)[3] * 20 > mu
    assert 20 < as_floats(counts, "minus")[3] * 20 < mu - sigma / TAU


def test_balanced_classes_stay_as_they_are() -> None:
    assert as_floats(torch.tensor([50, 50, 50])) == [1.0, 1.0, 1.0]


def test_integer_ratios_copy_without_randomness() -> None:
    y = torch.tensor([0, 1, 0, 2])
    positions, keys = multiply(y, torch.tensor([ONE, 3 * ONE, 2 * ONE]), random.bits(0, random.RESAMPLE, 7))
    assert positions.tolist() == [0, 1, 1, 1, 2, 3, 3]
    assert (keys == 0).tolist() == [True, True, False, False, True, True, False]


def test_the_fraction_of_a_ratio_is_a_probability() -> None:
    y = torch.arange(2).repeat_interleave(20_000)
    ratios = torch.tensor([int(2.3 * ONE), int(0.4 * ONE)])
    positions, keys = multiply(y, ratios, random.bits(0, random.RESAMPLE, 1))
    counts = torch.bincount(y[positions])
    assert counts.tolist() == pytest.approx([46_000, 8_000], rel=0.02)
    kept = positions[y[positions] == 1]
    assert len(kept.unique()) == len(kept)
    assert bool((keys[y[positions] == 1] == 0).all())


def test_keys_of_copies_are_positive_and_distinct() -> None:
    y = torch.zeros(500, dtype=torch.int64)
    keys = [multiply(y, torch.tensor([4 * ONE]), random.bits(0, random.RESAMPLE, c))[1] for c in range(2)]
    copies = torch.cat(keys)
    copies = copies[copies != 0]
    assert len(copies) == 3000
    assert bool((copies > 0).all())
    assert len(copies.unique()) == 3000


def test_a_client_keeps_at_least_one_sample() -> None:
    positions, keys = multiply(torch.tensor([1, 1, 1]), torch.tensor([ONE, 0]), random.bits(0, random.RESAMPLE, 1))
    assert positions.tolist() == [0]
    assert keys.tolist() == [0]


def test_a_client_without_samples_stays_without_samples() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    positions, keys = multiply(nothing, torch.tensor([ONE]), random.bits(0, random.RESAMPLE, 1))
    assert positions.tolist() == keys.tolist() == []

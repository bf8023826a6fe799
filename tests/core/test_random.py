"""Draws: they never change, they are the same however they are computed, and they are fair."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.core import random

MASK = (1 << 64) - 1

GOLDEN_BITS = [4723828388691666090, -5101573486688048832, -3206270226386957560]
GOLDEN_DRAWS = [784066931174034465, 7461114958002481845, -8537597777309092080]
GOLDEN_ORDER = [2, 9, 7, 0, 4, 8, 5, 3, 1, 6]
GOLDEN_UNIFORM = [713104.0, 6785844.0, 9012316.0]
GOLDEN_CHANCE = [1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0]
GOLDEN_FEW = [5, 23, 43, 51, 66]
GOLDEN_MANY = [291632, 377719, 407923, 492299, 979475]


def splitmix(z: int) -> int:
    """The splitmix64 finaliser on plain unsigned integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def plain_bits(seed: int, *words: int) -> int:
    """`random.bits` in Python's unbounded integers."""
    key = seed & MASK
    for word in words:
        key = splitmix((key + 0x9E3779B97F4A7C15 + splitmix((word & MASK) ^ 0x94D049BB133111EB)) & MASK)
    return key


def chi_square(counts: Tensor) -> float:
    expected = counts.double().mean()
    return float(((counts - expected) ** 2 / expected).sum())


def within(statistic: float, freedom: int) -> bool:
    """Neither too uneven nor too even: chi-square within five standard deviations of its mean."""
    return abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_known_answers() -> None:
    """Golden values: if one of these changes, no earlier run can be repeated."""
    assert random.bits(0).item() == 0
    assert random.bits(0, 0).item() == GOLDEN_BITS[0]
    assert random.bits(1, random.TRAIN, 2, 3, 4).item() == GOLDEN_BITS[1]
    assert random.bits(2**63 + 5, -1).item() == GOLDEN_BITS[2]
    key = random.bits(7, random.ORDER)
    assert random.draws(key, 3).tolist() == GOLDEN_DRAWS
    assert random.order(key, 10).tolist() == GOLDEN_ORDER
    assert (random.uniform(key, 3) * 2**24).tolist() == GOLDEN_UNIFORM
    assert random.chance(key, 12, 0.3).long().tolist() == GOLDEN_CHANCE
    assert random.choose(7, (random.SELECT, 0), 100, 5).tolist() == GOLDEN_FEW
    assert random.choose(7, (random.SELECT, 0), 1_000_000, 5).tolist() == GOLDEN_MANY


@pytest.mark.parametrize("seed", [0, 1, -3, 2**64 - 1])
@pytest.mark.parametrize("words", [(), (0,), (-1, 5), (2**62, -(2**62), 17)])
def test_bits_are_splitmix64(seed: int, words: tuple[int, ...]) -> None:
    assert random.bits(seed, *words).item() & MASK == plain_bits(seed, *words)


def test_words_may_be_numpys_or_tensors() -> None:
    expected = random.bits(3, 4, -5)
    assert random.bits(np.int64(3), np.int64(4), torch.tensor(-5)) == expected  # type: ignore[arg-type]
    assert random.bits(3, torch.tensor(4, dtype=torch.int32), np.int32(-5)) == expected  # type: ignore[arg-type]


def test_words_of_uses_are_distinct() -> None:
    uses = [
        random.INIT, random.SELECT, random.TRAIN, random.ORDER, random.DROPOUT, random.RESAMPLE, random.AUGMENT,
        random.SPLIT,
    ]  # fmt: skip
    assert uses == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_order_of_words_matters() -> None:
    assert random.bits(0, 1, 2) != random.bits(0, 2, 1)


KEYS = random.bits(5, torch.arange(6))
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "fold": lambda key: random.fold(random.fold(key, 3), torch.arange(64)),
    "draws": lambda key: random.draws(key, 100),
    "uniform": lambda key: random.uniform(key, 100),
    "chance": lambda key: random.chance(key, 100, 0.37),
    "order": lambda key: random.order(key, 100),
    "order of the valid": lambda key: random.order(key, 100, torch.arange(100) < 60),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_vmap_draws_the_same(draw: Callable[[Tensor], Tensor]) -> None:
    alone = torch.stack([draw(key) for key in KEYS])
    assert torch.equal(torch.vmap(draw)(KEYS), alone)


def test_compiled_code_draws_the_same() -> None:
    """`draws` folds an arange, whose multiplication by a constant the compiler moves into index arithmetic."""

    def everything(keys: Tensor) -> list[Tensor]:
        alone = [DRAWS["fold"](keys[0]), DRAWS["draws"](keys[1])]
        return alone + [
            torch.vmap(DRAWS[name])(keys) for name in ("draws", "uniform", "chance", "order of the valid")
        ]

    torch.compiler.reset()
    for one, other in zip(everything(KEYS), torch.compile(everything, fullgraph=True)(KEYS), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_chance_is_exact_at_its_ends(probability: float) -> None:
    drawn = random.chance(random.bits(3), 200_000, probability)
    assert bool(drawn.all()) == bool(drawn.any()) == (probability == 1)


@pytest.mark.parametrize("probability", [0.0, 1.0])
@pytest.mark.parametrize("word", [0, -1, 2**63 - 1, -(2**63)])
def test_chance_is_exact_for_the_rarest_words(monkeypatch: pytest.MonkeyPatch, probability: float, word: int) -> None:
    monkeypatch.setattr(random, "draws", lambda key, size: torch.full((size,), word))
    assert random.chance(random.bits(3), 1, probability).item() == (probability == 1)


@pytest.mark.parametrize("probability", [0.01, 0.25, 0.5, 0.9])
def test_chance_has_its_probability(probability: float) -> None:
    n = 200_000
    share = random.chance(random.bits(4), n, probability).double().mean().item()
    assert abs(share - probability) < 5 * (probability * (1 - probability) / n) ** 0.5


def test_uniform_is_even_and_below_one() -> None:
    drawn = random.uniform(random.bits(9), 100_000)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert within(chi_square(torch.histc(drawn, 100, 0, 1)), 99)


def test_uniform_is_the_same_number_in_every_precision() -> None:
    key = random.bits(9)
    assert torch.equal(random.uniform(key, 1000).double(), random.uniform(key, 1000, torch.float64))


def test_every_bit_is_even() -> None:
    drawn = random.draws(random.bits(11), 20_000)
    for bit in range(64):
        ones = int(((drawn >> bit) & 1).sum())
        assert abs(ones - 10_000) < 5 * 5_000**0.5, bit


def test_order_is_a_permutation() -> None:
    orders = random.order(random.bits(2, torch.arange(50)), 30)
    assert torch.equal(orders.sort(-1).values, torch.arange(30).expand(50, 30))


def test_order_is_uniform() -> None:
    orders = random.order(random.bits(2, torch.arange(24_000)), 4)
    number = (orders * torch.tensor([64, 16, 4, 1])).sum(-1)
    counts = number.unique(return_counts=True)[1]
    assert len(counts) == 24
    assert within(chi_square(counts), 23)


def test_the_valid_come_first_and_in_the_order_they_would_have_alone() -> None:
    for n in (1, 7, 20):
        key = random.bits(13, n)
        assert torch.equal(random.order(key, 20, torch.arange(20) < n)[:n], random.order(key, n))


@pytest.mark.parametrize(("population", "size"), [(10, 10), (100, 7), (4096, 50), (4097, 50), (70_000, 69_999)])
def test_choose_gives_distinct_sorted_members(population: int, size: int) -> None:
    chosen = random.choose(1, (random.SELECT, 3), population, size)
    assert len(chosen.unique()) == len(chosen) == size
    assert torch.equal(chosen, chosen.sort().values)
    assert chosen.min() >= 0
    assert chosen.max() < population


@pytest.mark.parametrize("population", [40, 12_000])
def test_choose_is_uniform(population: int) -> None:
    """Both ways of choosing: a shuffle of few, a Feistel network over many."""
    size, rounds = population // 4, 200
    chosen = torch.cat([random.choose(1, (random.SELECT, r), population, size) for r in range(rounds)])
    counts = torch.bincount(chosen, minlength=population)
    # Drawn without replacement, a member's count is binomial with variance rounds * 1/4 * 3/4.
    assert within(chi_square(counts) / 0.75, population - 1)


@pytest.mark.parametrize("population", [40, 12_000])
def test_members_are_chosen_together_as_often_as_by_chance(population: int) -> None:
    size, rounds = population // 2, 200
    together = torch.zeros(3)
    for r in range(rounds):
        member = torch.zeros(population, dtype=torch.bool)
        member[random.choose(2, (random.SELECT, r), population, size)] = True
        together += torch.stack([member[0] & member[1], member[3] & member[20], member[5] & member[-1]])
    chance = 0.5 * (size - 1) / (population - 1)
    assert ((together / rounds - chance).abs() < 5 * (chance * (1 - chance) / rounds) ** 0.5).all()


def test_rounds_and_seeds_choose_differently() -> None:
    drawn = {
        tuple(random.choose(seed, (random.SELECT, r), 10_000, 20).tolist()) for seed in range(4) for r in range(4)
    }
    assert len(drawn) == 16


def test_choosing_from_a_huge_population_costs_what_is_chosen() -> None:
    began = time.perf_counter()
    chosen = random.choose(0, (random.SELECT, 0), 10**15, 100)
    assert time.perf_counter() - began < 1  # 10**15 of anything would not fit in the memory of a machine
    assert len(chosen.unique()) == 100
    assert chosen.max() > 10**14


def test_choosing_more_than_there_are_gives_all() -> None:
    assert random.choose(0, (1,), 5, 9).tolist() == [0, 1, 2, 3, 4]
    assert len(random.choose(0, (1,), 5_000, 9_000)) == 5_000

"""Laws of keyed draws: a draw depends on its key alone, uses never meet, and every range and frequency is right."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.core import random
from tests.strategies import SEEDS

WORDS = st.integers(-(2**63), 2**63 - 1)
USES = [
    random.INIT, random.SELECT, random.TRAIN, random.ORDER, random.DROPOUT, random.RESAMPLE, random.AUGMENT,
    random.SPLIT, random.FLIP,
]  # fmt: skip
SIZES = st.integers(0, 40)


def standard_deviations(share: float, probability: float, n: int) -> float:
    """Return how far a share among n draws is from its probability, in standard deviations."""
    return abs(share - probability) / math.sqrt(probability * (1 - probability) / n)


@given(SEEDS, st.lists(WORDS, max_size=4))
def test_numbers_and_tensors_as_words_give_the_same_bits(seed: int, words: list[int]) -> None:
    expected = random.bits(seed, *words)
    assert random.bits(seed, *(torch.tensor(word) for word in words)) == expected
    assert random.bits(seed + 2**64, *words) == expected
    key = random.bits(seed)
    for word in words:
        key = random.fold(key, word)
    assert key == expected
    for split in range(len(words)):
        mixed: list[Tensor | int] = [*words[:split], torch.tensor(words[split]), *words[split + 1 :]]
        assert random.bits(seed, *mixed) == expected


@given(SEEDS, st.lists(WORDS, min_size=1, max_size=8), SIZES, st.floats(0, 1))
def test_stacked_keys_draw_what_each_key_draws_alone(
    seed: int, words: list[int], size: int, probability: float
) -> None:
    """The same bits eager, batched and under vmap."""
    keys = random.bits(seed, random.TRAIN, torch.tensor(words))
    valid = torch.arange(size) % 3 > 0
    for draw in (
        lambda key: (
            random.fold(key, torch.arange(size)) if key.dim() == 0 else random.fold(key[:, None], torch.arange(size))
        ),
        lambda key: random.draws(key, size),
        lambda key: random.uniform(key, size),
        lambda key: random.chance(key, size, probability),
        lambda key: random.order(key, size),
        lambda key: random.order(key, size, valid),
    ):
        alone = torch.stack([draw(random.bits(seed, random.TRAIN, word)) for word in words])
        assert torch.equal(draw(keys), alone)
        assert torch.equal(torch.vmap(draw)(keys), alone)


@given(SEEDS, st.integers(1, 6), st.integers(1, 6))
def test_the_shape_of_a_batch_changes_no_draw(seed: int, rounds: int, clients: int) -> None:
    grid = random.bits(seed, torch.arange(rounds)[:, None], torch.arange(clients))
    assert grid.shape == (rounds, clients)
    flat = random.bits(seed, torch.arange(rounds).repeat_interleave(clients), torch.arange(clients).repeat(rounds))
    assert torch.equal(grid.flatten(), flat)
    assert torch.equal(random.uniform(grid, 3).view(-1, 3), random.uniform(flat, 3))
    assert torch.equal(random.order(grid, 5).view(-1, 5), random.order(flat, 5))


@given(st.data(), SEEDS, st.integers(1, 12))
def test_the_order_of_asking_changes_no_draw(data: st.DataObject, seed: int, clients: int) -> None:
    asked = data.draw(st.permutations(range(clients)))
    straight = {client: random.uniform(random.bits(seed, random.TRAIN, client), 4) for client in range(clients)}
    for client in asked:
        assert torch.equal(random.uniform(random.bits(seed, random.TRAIN, client), 4), straight[client])


@given(SEEDS, SIZES, SIZES)
def test_fewer_draws_are_the_first_of_more(seed: int, few: int, more: int) -> None:
    key = random.bits(seed)
    few, more = sorted((few, more))
    assert torch.equal(random.draws(key, few), random.draws(key, more)[:few])
    assert torch.equal(random.uniform(key, few), random.uniform(key, more)[:few])


@given(SEEDS, st.lists(WORDS, max_size=3), st.lists(WORDS, min_size=2, max_size=50, unique=True))
def test_one_other_word_gives_another_key(seed: int, rest: list[int], words: list[int]) -> None:
    """Exact, not just likely: folding is a bijection of the key, and of the word."""
    keys = random.bits(seed, torch.tensor(words), *rest)
    assert len(keys.unique()) == len(words)
    seeds = torch.stack([random.bits(word, *rest) for word in words])
    assert len(seeds.unique()) == len(words)


@given(SEEDS, st.lists(st.integers(-3, 300), min_size=1, max_size=3))
def test_uses_never_share_a_draw(seed: int, words: list[int]) -> None:
    """Neither do keys of the same words in another order, nor a key and the draws that are made from it."""
    keys = random.bits(seed, torch.tensor(USES), *words)
    turned = random.bits(seed, *words, torch.tensor(USES))
    drawn = random.draws(keys, 64).flatten()
    every = torch.cat([keys, turned, drawn]) if words[0] not in USES else torch.cat([keys, drawn])
    assert len(every.unique()) == len(every)


@given(SEEDS, st.lists(st.booleans(), max_size=60))
def test_order_is_a_permutation_with_the_valid_positions_first(seed: int, valid: list[bool]) -> None:
    key, size = random.bits(seed), len(valid)
    order = random.order(key, size, torch.tensor(valid).bool())
    assert sorted(order.tolist()) == sorted(random.order(key, size).tolist()) == list(range(size))
    flags = [valid[i] for i in order.tolist()]
    assert flags == sorted(flags, reverse=True)
    # The positions that are not valid come in their natural order, so that padding never depends on the key.
    padding = order.tolist()[sum(valid) :]
    assert padding == sorted(padding)


@given(SEEDS, st.integers(0, 20), st.integers(0, 20))
def test_padding_changes_no_order(seed: int, n: int, padding: int) -> None:
    key = random.bits(seed)
    padded = random.order(key, n + padding, torch.arange(n + padding) < n)
    assert torch.equal(padded[:n], random.order(key, n, torch.ones(n, dtype=torch.bool)))


@given(SEEDS, st.integers(1, 4096) | st.integers(4097, 2**60), st.integers(0, 200), st.integers(0, 3))
def test_choose_gives_distinct_sorted_numbers_below_the_population(
    seed: int, population: int, size: int, word: int
) -> None:
    chosen = random.choose(seed, (random.SELECT, word), population, size)
    numbers = chosen.tolist()
    assert len(numbers) == min(size, population)
    assert numbers == sorted(set(numbers))
    assert all(0 <= number < population for number in numbers)
    assert torch.equal(chosen, random.choose(seed, (random.SELECT, word), population, size))
    if size:  # one member less is a part of the same choice
        assert set(random.choose(seed, (random.SELECT, word), population, size - 1).tolist()) <= set(numbers)


@given(SEEDS, st.sampled_from([4097, 5000, 16384, 16385, 20000]))
@settings(max_examples=10)
def test_choosing_all_of_a_large_population_gives_everyone(seed: int, population: int) -> None:
    assert torch.equal(random.choose(seed, (), population, population), torch.arange(population))


@given(SEEDS, st.sampled_from([50, 4096, 4097, 10**6, 10**12]))
@settings(max_examples=10)
def test_choose_favours_no_part_of_the_population(seed: int, population: int) -> None:
    """Of the members chosen in many rounds, a half lies in the lower half and a fifth in the upper fifth."""
    drawn = torch.cat([random.choose(seed, (random.SELECT, r), population, 10) for r in range(100)]).double()
    lower = (drawn < population // 2).double().mean().item()
    upper = (drawn >= population - population // 5).double().mean().item()
    assert standard_deviations(lower, (population // 2) / population, 1000) < 5
    assert standard_deviations(upper, (population // 5) / population, 1000) < 5


@given(SEEDS, st.sampled_from([torch.float32, torch.float64]))
def test_uniform_is_in_range_on_its_grid_and_even(seed: int, dtype: torch.dtype) -> None:
    drawn = random.uniform(random.bits(seed), 4000, dtype)
    assert drawn.dtype == dtype
    assert 0 <= float(drawn.min()) <= float(drawn.max()) < 1
    assert torch.equal(drawn * 2**24, (drawn * 2**24).round())
    for border in (0.1, 0.5, 0.9):
        assert standard_deviations((drawn < border).double().mean().item(), border, 4000) < 5


@given(SEEDS, st.floats(0.01, 0.99))
def test_chance_is_as_frequent_as_it_says(seed: int, probability: float) -> None:
    drawn = random.chance(random.bits(seed), 4000, probability)
    assert drawn.dtype == torch.bool
    assert standard_deviations(drawn.double().mean().item(), probability, 4000) < 5


@given(SEEDS, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_chance_is_true_wherever_a_smaller_one_is(seed: int, one: float, other: float) -> None:
    key = random.bits(seed)
    low, high = (random.chance(key, 100, probability) for probability in sorted((one, other)))
    assert bool((high | ~low).all())
    assert not random.chance(key, 100, 0.0).any()
    assert bool(random.chance(key, 100, 1.0).all())


@pytest.mark.parametrize("use", USES)
@given(seed=SEEDS)
@settings(max_examples=5)
def test_draws_of_two_uses_are_uncorrelated(use: int, seed: int) -> None:
    def centred(word: int) -> Tensor:
        return random.uniform(random.bits(seed, word, 3), 4000, torch.float64) - 0.5

    for other in USES:
        if other != use:  # the variance of a uniform number is 1/12
            correlation = float((centred(use) * centred(other)).mean()) * 12
            assert abs(correlation) < 5 / math.sqrt(4000)

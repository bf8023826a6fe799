"""Counter-based draws: every number is a pure function of what it is for.

`bits(seed, TRAIN, round, wave, client)` is a key; folding in a use and an index gives the draw itself. Nothing is
stored and nothing is consumed, so no draw depends on the order of clients, on stacking, on the engine or on a
resume. Everything is integer arithmetic (the splitmix64 finaliser on wrapping int64 tensors), which gives the same
bits eager, under vmap, compiled and on every device. Decisions are taken with integers, never with floats, whose
last bit may differ between eager and compiled code.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What a draw is for, so that no two uses share a stream.
INIT, SELECT, TRAIN, ORDER, DROPOUT, RESAMPLE, AUGMENT, SPLIT, FLIP, FORWARD = range(1, 11)
SERVER = -1  # the server's place among the client numbers


def _signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _mix(z: Tensor) -> Tensor:
    # >> on int64 copies the sign bit; the mask makes it the logical shift that splitmix64 wants.
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FIRST
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _SECOND
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _mix_number(z: int) -> int:
    """`_mix` of a number known beforehand, which need not travel to the device."""
    z &= (1 << 64) - 1
    z = (z ^ (z >> 30)) * _FIRST & ((1 << 64) - 1)
    z = (z ^ (z >> 27)) * _SECOND & ((1 << 64) - 1)
    return _signed(z ^ (z >> 31))


def fold(key: Tensor, word: Tensor | int) -> Tensor:
    """A new key from a key and one more word; broadcasts."""
    # The xor comes first on purpose: torch.compile folds arange * c + d into an index expression and gets
    # the wrapping wrong, but it leaves the bits of an xor alone.
    if isinstance(word, Tensor):
        return _mix(key + _GOLDEN + _mix(word.to(key.device, torch.int64) ^ _SECOND))
    return _mix(key + _GOLDEN + _mix_number(int(word) ^ _SECOND))


def bits(seed: int, *words: Tensor | int, device: torch.device | str | None = None) -> Tensor:
    """64 random bits (as int64) for a seed and any words that say what they are for."""
    first = next((at for at, word in enumerate(words) if isinstance(word, Tensor)), len(words))
    number = _signed(int(seed))
    for word in words[:first]:
        number = _mix_number(number + _GOLDEN + _mix_number(int(word) ^ _SECOND))
    key = torch.tensor(number, dtype=torch.int64, device=device)
    for word in words[first:]:
        key = fold(key, word)
    return key


def draws(key: Tensor, size: int) -> Tensor:
    """`size` independent 64-bit draws from one key."""
    return fold(key[..., None], torch.arange(size, device=key.device))


def uniform(key: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Floats in [0, 1) on a grid of 2**-24, exact in every floating type from float32 on."""
    return ((draws(key, size) >> 40) & ((1 << 24) - 1)).to(dtype) * 2.0**-24


def chance(key: Tensor, size: int, probability: float) -> Tensor:
    """Booleans, true with the given probability, decided on integers."""
    return ((draws(key, size) >> 32) & ((1 << 32) - 1)) < round(probability * (1 << 32))


def order(key: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """A random permutation of range(size); where `valid` is given, the valid positions come first."""
    keys = draws(key, size)
    if valid is not None:
        keys = torch.where(valid, keys >> 1, torch.iinfo(torch.int64).max)
    return keys.argsort(dim=-1, stable=True)


def choose(seed: int, words: tuple[int, ...], population: int, size: int) -> Tensor:
    """`size` distinct numbers below `population`, sorted, in O(size) time and memory.

    The first `size` values of a keyed Feistel permutation of the smallest power of four that holds the population;
    values outside walk along their cycle until they fall inside. Small populations are simply shuffled, since a
    Feistel network of a few bits is a poor shuffle.
    """
    key = bits(seed, *words)
    if population <= 4096:
        return order(key, population)[:size].sort().values
    half = ((population - 1).bit_length() + 1) // 2
    low = (1 << half) - 1
    turns = [fold(key, turn) for turn in range(6)]

    def permute(value: Tensor) -> Tensor:
        left, right = value >> half, value & low
        for turn in turns:
            left, right = right, left ^ (fold(turn, right) & low)
        return (left << half) | right

    value = permute(torch.arange(min(size, population)))
    while bool((outside := value >= population).any()):
        value = torch.where(outside, permute(value), value)
    return value.sort().values

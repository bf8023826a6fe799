"""Checks of methods' settings and of the local training they need: one sentence each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError, nearest

if TYPE_CHECKING:
    from equipoise.federation import Federation
    from equipoise.method import Chain, Method


def _refuse(method: Method, field: str, expected: str) -> ConfigError:
    return ConfigError(f"method: {method.name}({field}={getattr(method, field)!r}): expected {expected}")


def at_least(method: Method, field: str, low: float) -> None:
    value = getattr(method, field)
    if not (math.isfinite(value) and value >= low):
        raise _refuse(method, field, f"a number, {low:g} or above")


def above(method: Method, field: str, low: float) -> None:
    value = getattr(method, field)
    if not (math.isfinite(value) and value > low):
        raise _refuse(method, field, f"a number above {low:g}")


def share(method: Method, field: str) -> None:
    value = getattr(method, field)
    if not 0 <= value < 1:
        raise _refuse(method, field, "a number in [0, 1)")


def between(method: Method, field: str, low: float, high: float) -> None:
    value = getattr(method, field)
    if not low <= value < high:
        raise _refuse(method, field, f"a number in [{low:g}, {high:g})")


def one_of(method: Method, field: str, choices: tuple[str, ...]) -> None:
    value = getattr(method, field)
    if value not in choices:
        raise _refuse(method, field, f"one of {', '.join(choices)}; {nearest(value, choices)}")


def whole(method: Method, field: str, low: int) -> None:
    value = getattr(method, field)
    if not (isinstance(value, int) and value >= low):
        raise _refuse(method, field, f"a whole number, {low} or above")


def needs_images(method: Method, fed: Federation, instead: str) -> None:
    """For methods that shift and turn samples."""
    if fed.x.dim() != 4:
        shape = tuple(fed.x.shape[1:])
        raise ConfigError(f"method: {method.name} warps images, and these samples have shape {shape}; {instead}")


def refuse_single_visits(method: Method, chain: Chain, instead: str) -> None:
    """For methods that make chains of clients, at the start rather than in the first round."""
    for other in chain:
        if other.single_visits:
            raise ConfigError(
                f"method: {other.name} is only defined for clients that start from the global model, and with"
                f" {method.name} each starts where another ended; leave out {other.name}, or {instead}"
            )


def refuse_beside(method: Method, chain: Chain, others: tuple[str, ...], both: str) -> None:
    """For methods that would do the same thing twice; `both` says what."""
    for other in chain:
        if other.name in others:
            raise ConfigError(f"method: {method.name} and {other.name} {both}; keep one of them")


def needs_cross_entropy(method: Method, chain: Chain) -> None:
    """For methods whose formula is about probabilities."""
    for other in chain.having("loss"):
        raise ConfigError(
            f"method: {method.name} changes the cross entropy, which {other.name} replaces; keep one of them"
        )


def needs_sgd(method: Method, fed: Federation, chain: Chain) -> None:
    """For methods that read a gradient off the length of a client's step."""
    if (optimiser := chain.local(fed.local).optimiser) != "sgd":
        raise ConfigError(
            f"method: {method.name} reads gradients off the clients' steps, whose length {optimiser} changes;"
            f" expected local.optimiser = 'sgd', not {optimiser!r}"
        )

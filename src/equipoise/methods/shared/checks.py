"""Checks of a method's settings, and of the federation and the chain it is used in. Each raises one sentence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from equipoise.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from equipoise.core.chain import Chain
    from equipoise.core.method import Method
    from equipoise.core.server_view import ServerView


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


def needs_images(method: Method, fed: ServerView, instead: str) -> None:
    """Refuse samples that are not images, for methods that shift and rotate them."""
    if len(fed.shape) != 3:
        raise ConfigError(
            f"method: {method.name} warps images, and samples of shape {fed.shape} are not images; {instead}"
        )


def refuse_single_visits(method: Method, chain: Chain, instead: str) -> None:
    """Refuse methods that need clients to start from the global model, for methods that train clients in a chain.

    The first round would refuse them too; this check is made before any training.
    """
    for other in chain:
        if other.single_visits:
            raise ConfigError(
                f"method: {other.name} is only defined for clients that start from the global model, but with"
                f" {method.name} a client starts where another ended; leave out {other.name}, or {instead}"
            )


def refuse_beside(method: Method, chain: Chain, others: tuple[str, ...], both: str) -> None:
    """Refuse `others` in the same chain, for methods that would do the same thing twice; `both` says what they do."""
    for other in chain:
        if other.name in others:
            raise ConfigError(f"method: {method.name} and {other.name} {both}; keep one of them")


def needs_cross_entropy(method: Method, chain: Chain) -> None:
    """Refuse another loss in the chain, for methods whose formula uses probabilities."""
    for other in chain.having("loss"):
        raise ConfigError(
            f"method: {method.name} changes the cross entropy, which {other.name} replaces; keep one of them"
        )


def needs_sgd(method: Method, fed: ServerView, chain: Chain) -> None:
    """Refuse optimisers other than SGD, for methods that compute a gradient from a client's delta."""
    if (optimiser := chain.local(fed.local).optimiser) != "sgd":
        raise ConfigError(
            f"method: {method.name} computes gradients from the clients' deltas, which takes steps of plain SGD;"
            f" expected local.optimiser = 'sgd', not {optimiser!r}"
        )

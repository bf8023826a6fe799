"""Checks of methods' settings and of the local training they need: one sentence each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError

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


def needs_sgd(method: Method, fed: Federation, chain: Chain) -> None:
    """For methods that read a gradient off the length of a client's step."""
    if (optimiser := chain.local(fed.local).optimiser) != "sgd":
        raise ConfigError(
            f"method: {method.name} reads gradients off the clients' steps, whose length {optimiser} changes;"
            f" expected local.optimiser = 'sgd', not {optimiser!r}"
        )

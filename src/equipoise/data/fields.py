"""Checks of the settings of imbalances, partitions and sources; each raises ConfigError with one sentence."""

from __future__ import annotations

import math
import sys
from numbers import Integral, Real

from equipoise.core.errors import ConfigError, nearest


def whole(where: str, value: object, least: int) -> int:
    """Return `value` as an int of at least `least`; `where` names it in the error."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{where} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def real(where: str, value: object, least: float, most: float = math.inf, above: bool = False) -> float:
    """Return `value` as a finite float in [least, most] or, with `above`, in (least, most]."""
    number = not isinstance(value, bool) and isinstance(value, Real)
    number = number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]  # no NaN, and no overflow in float()
    if not number or not (least <= float(value) <= most) or (above and float(value) == least):  # type: ignore[arg-type]
        low = f"above {least:g}" if above else f"of at least {least:g}"
        high = f" and at most {most:g}" if most < math.inf else ""
        raise ConfigError(f"{where} must be a number {low}{high}, not {value!r}")
    return float(value)  # type: ignore[arg-type]


def flag(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, not {value!r}")
    return value


def choice(where: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{where} is {value!r}, which is unknown: {nearest(value, choices)}")
    return value

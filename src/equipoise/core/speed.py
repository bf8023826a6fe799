"""The one door between the plain code and the room `fast`, whose code does the same faster.

Where the room has something to offer, the plain code asks for it by a name and says what to use otherwise:
`faster("materialise", plain)`. The room registers what it has when it is loaded, here and nowhere else, at the first
such question. It relies on internals of torch, so it is on only with the versions it was tested with; without it, and
with the whole folder gone, everything works and is slower.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import cache
from typing import Any, TypeVar

import torch

from equipoise.core.errors import EquipoiseError

T = TypeVar("T")
OLDEST, NEWEST = (2, 11), (2, 13)  # versions of torch that the tests are run with
ROOM = "equipoise.fast"

_registered: dict[str, Any] = {}


def register(name: str, thing: Any) -> None:
    """For the room: what takes the place of the plain thing of this name."""
    _registered[name] = thing


def faster(name: str, plain: T) -> T:
    """What the room `fast` has in the place of `plain`; `plain` itself where the room is off or has nothing."""
    found: T = _registered.get(name, plain) if off() is None else plain
    return found


@cache
def off() -> str | None:
    """Why the room `fast` is off; None where it is on. It is loaded, once, by the first who asks."""
    if importlib.util.find_spec(ROOM) is None:
        return "it is not installed"
    if _version(torch.__version__) > NEWEST:
        return _warned(
            f"torch {torch.__version__} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest it was tested with"
        )
    try:
        importlib.import_module(ROOM)
    except Exception as error:  # an internal of torch is not there any more, or is another
        _registered.clear()
        return _warned(f"it does not load with torch {torch.__version__} ({type(error).__name__}: {error})")
    return None


def _warned(reason: str) -> str:
    warnings.warn(f"Equipoise runs without its fast code: {reason}", stacklevel=4)
    return reason


def _version(text: str) -> tuple[int, int]:
    """
    >>> _version("2.13.0+cpu")
    (2, 13)
    """
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()))


if _version(torch.__version__) < OLDEST:
    raise EquipoiseError(
        f"torch {torch.__version__} is too old: expected {OLDEST[0]}.{OLDEST[1]} or newer, as in"
        f" pip install torch=={NEWEST[0]}.{NEWEST[1]}.0"
    )

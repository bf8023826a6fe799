"""In which numbers an engine computes, and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from equipoise.core.errors import ConfigError, nearest

PRECISIONS = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.float32,
    "float64": torch.float64,
}


def checked(device: str, precision: str) -> tuple[torch.device, torch.dtype]:
    """The device, and the type in which parameters are kept."""
    if precision not in PRECISIONS:
        choices = f"expected one of {', '.join(PRECISIONS)}; {nearest(precision, PRECISIONS)}"
        raise ConfigError(f"train.precision = {precision!r}: {choices}")
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.device = {device!r}: torch finds no CUDA device here; expected cpu or auto")
    return torch.device(device), PRECISIONS[precision]


@contextmanager
def arithmetic(device: torch.device, precision: str) -> Iterator[None]:
    """TF32 only where it was asked for: left alone, torch uses it in convolutions and nowhere else."""
    if device.type != "cuda":
        yield
        return
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = precision in ("tf32", "bf16")
        yield
    finally:
        for place, allowed in zip(places, before, strict=True):
            place.allow_tf32 = allowed

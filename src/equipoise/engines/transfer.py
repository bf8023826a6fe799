"""Copies to the device: of small tensors without waiting for it, of large ones only once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

# A copy by the address and version of what it was made from. Weak references: the cache keeps neither alive.
_COPIES: dict[Any, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device. The host does not wait for it, as it would for a copy from ordinary memory."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def shared_copy(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device, in one copy for all who ask for them: many runs have the same pool of samples."""
    if device.type == "cpu":
        return values.to(device)
    key = (values.data_ptr(), values.shape, values.stride(), values.dtype, values._version, device)
    source, copy = (held() for held in _COPIES.get(key, (lambda: None, lambda: None)))
    if source is None or copy is None:
        copy = values.to(device)
        _COPIES[key] = weakref.ref(values), weakref.ref(copy)
    return copy

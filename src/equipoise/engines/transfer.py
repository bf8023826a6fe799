"""Small things on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def there(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device, without waiting for it: an ordinary copy would let the host wait in every round."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)

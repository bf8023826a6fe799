"""Dense layers with few outputs, as the last of a classifier, where clients are stacked on a GPU.

The vendor's library multiplies such narrow matrices slowly, and what comes before and after is a kernel of its own.
Written as a sum of products, each of the three multiplications of a step becomes one kernel of the compiler's with
what surrounds it: the activation, its gradient, the change of the weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW, ROWS, WIDE = 16, 256, 1024  # outputs, samples and inputs of a client: with more of them the library is faster


class Dense(nn.Linear):
    """A layer of torch's that computes the same."""

    def forward(self, input: Tensor) -> Tensor:
        if not _narrow(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        product = sum_of_products(input, self.weight)
        return product if self.bias is None else product + self.bias

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        return type(layer) is nn.Linear and layer.out_features <= FEW


def sum_of_products(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`."""
    return (x[:, None, :] * weight).sum(-1)


def _narrow(x: Tensor, weight: Tensor) -> bool:
    """Is it a batch of one of many clients, in a program that is being compiled?"""
    return (
        x.device.type == "cuda"
        and x.dim() == 2
        and len(x) <= ROWS
        and weight.shape[1] <= WIDE
        and torch.compiler.is_compiling()
        and torch._C._are_functorch_transforms_active()
    )

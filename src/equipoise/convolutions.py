"""Convolutions under vmap, where every client has weights of its own.

On CUDA vmap makes one grouped convolution of them, and the vendor's library runs that at about half the speed of a
plain one. Here it becomes one of three operators on tensors with a client axis and the channels last: a convolution
and its gradients with respect to the input and to the weights, each a kernel of `equipoise.kernels`. vmap folds the
axis it adds into the clients, and the gradients of each operator are made of the other two. Elsewhere, and in exact
arithmetic, a convolution is torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction
from torch.nn.grad import conv2d_input, conv2d_weight

from equipoise.settled import below, settled

Sizes = Sequence[int]
Operator = Callable[..., Tensor]


class Convolution(nn.Conv2d):
    """A layer of torch's whose clients can be trained together."""

    padding: tuple[int, int]

    def forward(self, input: Tensor) -> Tensor:
        return conv2d(input, self.weight, self.bias, self.stride, self.padding)

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Is it torch's own, with a plain window over all channels and zeros around the image?"""
        return (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.dilation == (1, 1)
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes) -> Tensor:
    """`torch.nn.functional.conv2d`, at the speed of the tensor cores where clients are stacked."""
    dtype = _fast(x, weight)
    if dtype is None:
        return F.conv2d(x, weight, bias, stride, padding)
    y = stackable_conv2d(x.to(dtype), weight.to(dtype), stride, padding)
    return y if bias is None else y + bias.to(dtype).view(-1, 1, 1)


def _fast(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The type in which the kernels compute; None where a convolution stays torch's own."""
    if x.device.type != "cuda" or x.dim() != 4 or not torch._C._are_functorch_transforms_active():
        return None
    if torch.is_autocast_enabled("cuda"):
        return None if torch.float64 in (x.dtype, weight.dtype) else torch.get_autocast_dtype("cuda")
    if x.dtype != weight.dtype:
        return None
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.dtype if half or (x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32) else None


def stackable_conv2d(x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes) -> Tensor:
    """The convolution of one client by our operators; the channels of what it gives lie last in memory."""
    # Settled, since gradients read them too; unsqueezed, since the gradient of indexing would be a copy into zeros.
    y = _convolve(settled(_last(x)).unsqueeze(0), settled(_last(weight)).unsqueeze(0), stride, padding)
    return _second(y.squeeze(0))


def channels_last(x: Tensor) -> Tensor:
    """The same images, with the channels of a pixel side by side in memory; under vmap too."""
    return _second(_last(x))


def _last(values: Tensor) -> Tensor:
    """Channels last."""
    return values.permute(0, 2, 3, 1).contiguous()


def _second(values: Tensor) -> Tensor:
    """Channels second again, as torch counts them."""
    return values.permute(0, 3, 1, 2)


# -- three operators, on x[client, image, row, column, channel] and weight[client, filter, row, column, channel]


def _shape(x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes) -> tuple[int, ...]:
    both = zip(x.shape[2:4], weight.shape[2:4], stride, padding, strict=True)
    return (
        *x.shape[:2],
        *((size + 2 * pad - window) // step + 1 for size, window, step, pad in both),
        weight.shape[1],
    )


def _shape_input(g: Tensor, weight: Tensor, size: Sizes, stride: Sizes, padding: Sizes) -> tuple[int, ...]:
    return (*g.shape[:2], *size, weight.shape[-1])


def _shape_weight(g: Tensor, x: Tensor, size: Sizes, stride: Sizes, padding: Sizes) -> tuple[int, ...]:
    return (g.shape[0], g.shape[-1], *size, x.shape[-1])


def _one(x: Tensor, weight: Tensor, stride: Any, padding: Any) -> Tensor:
    return F.conv2d(x, weight, None, stride, padding)


def _one_input(g: Tensor, weight: Tensor, size: Sizes, stride: Any, padding: Any) -> Tensor:
    shape = (len(g), weight.shape[1], *size)
    gx: Tensor = conv2d_input(shape, weight, g, stride, padding)  # type: ignore[no-untyped-call]
    return gx


def _one_weight(g: Tensor, x: Tensor, size: Sizes, stride: Any, padding: Any) -> Tensor:
    shape = (g.shape[1], x.shape[1], *size)
    gw: Tensor = conv2d_weight(x, shape, g, stride, padding)  # type: ignore[no-untyped-call]
    return gw


def _gradients(need: Sizes, g: Tensor, x: Tensor, weight: Tensor, *moves: Sizes) -> tuple[Tensor | None, ...]:
    return (
        _convolve_input(g, weight, x.shape[2:4], *moves) if need[0] else None,
        _convolve_weight(g, x, weight.shape[2:4], *moves) if need[1] else None,
    )


def _gradients_input(
    need: Sizes, gx: Tensor, g: Tensor, weight: Tensor, _: Sizes, *moves: Sizes
) -> tuple[Tensor | None, ...]:
    return (
        _convolve(gx, weight, *moves) if need[0] else None,
        _convolve_weight(g, gx, weight.shape[2:4], *moves) if need[1] else None,
    )


def _gradients_weight(
    need: Sizes, gw: Tensor, g: Tensor, x: Tensor, _: Sizes, *moves: Sizes
) -> tuple[Tensor | None, ...]:
    return (
        _convolve(x, gw, *moves) if need[0] else None,
        _convolve_input(g, gw, x.shape[2:4], *moves) if need[1] else None,
    )


# -- what they have in common


def _by_torch(one: Operator, a: Tensor, b: Tensor, *rest: Sizes) -> Tensor:
    """One client after another."""
    return torch.stack([_last(one(_second(mine), _second(its), *rest)) for mine, its in zip(a, b, strict=True)])


def _by_kernel(kernel: str, one: Operator, shape: Callable[..., tuple[int, ...]], *given: Any) -> Tensor:
    """All clients at once. A single one is no slower with torch; and the kernels count in 32 bits within a client."""
    a, b, *rest = given
    largest = max(math.prod(size[1:]) for size in (a.shape, b.shape, shape(*given)))
    if len(a) == 1 or largest >= 1 << 31:
        return _by_torch(one, *given)
    from equipoise import kernels  # Triton is there where CUDA is

    run: Operator = getattr(kernels, kernel)
    # As the operators ask for; of tensors laid out otherwise the kernels would read the wrong numbers.
    return run(a.contiguous(), b.contiguous(), shape(*given), *rest[-2:])


def _fold(operator: Operator, images: bool, info: Any, dims: Any, a: Tensor, b: Tensor, *rest: Sizes) -> Any:
    """vmap: more clients; or more `images`, where the first tensor has them and the second is shared by all."""
    many = info.batch_size
    if images and dims[1] is None:
        a = a.movedim(dims[0], 1)
        y = operator(a.flatten(1, 2).contiguous(), b, *rest)
        return y.reshape(y.shape[0], many, -1, *y.shape[2:]), 1
    a, b = (
        part.expand(many, *part.shape) if dim is None else part.movedim(dim, 0)
        for part, dim in zip((a, b), dims, strict=False)
    )
    y = operator(a.flatten(0, 1).contiguous(), b.flatten(0, 1).contiguous(), *rest)
    return y.reshape(many, -1, *y.shape[1:]), 0


class _Bilinear(_SingleLevelFunction):
    """An operator that is linear in each of two tensors. It is a node of the one level of `torch.func` that is being
    worked on: below the operator's own dispatch, the function that serves all levels would serve this one twice."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, gradients: Any, a: Tensor, b: Tensor, *rest: Sizes) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        ctx.operator, ctx.gradients, ctx.rest = operator, gradients, rest
        with below():
            return operator(a, b, *rest)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        g = settled(g.contiguous())  # both gradients read it
        both = ctx.gradients(ctx.needs_input_grad[2:4], g, *ctx.saved_tensors, *ctx.rest)
        return None, None, *both, *[None] * len(ctx.rest)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, da: Tensor, db: Tensor, *rest: None) -> Tensor:
        a, b = ctx.saved_tensors
        changed: Tensor = ctx.operator(da, b, *ctx.rest) + ctx.operator(a, db, *ctx.rest)
        return changed


def _differentiable(operator: Operator, gradients: Any, *given: Any) -> Tensor:
    with enable_single_level_autograd_function():
        result: Tensor = _Bilinear.apply(operator, gradients, *given)  # type: ignore[attr-defined]
    return result


def _define(name: str, shape: Callable[..., tuple[int, ...]], one: Operator, gradients: Any, kernel: str) -> Operator:
    whole = f"equipoise::{name}"
    size = "" if shape is _shape else "int[] size, "
    # Inductor is to hand over what was asked for, contiguous tensors, and not the layout that it would prefer.
    exact = (torch.Tag.needs_exact_strides,)
    torch.library.define(whole, f"(Tensor a, Tensor b, {size}int[] stride, int[] padding) -> Tensor", tags=exact)
    operator: Operator = getattr(torch.ops.equipoise, name).default
    torch.library.impl(whole, "cpu", partial(_by_torch, one))
    torch.library.impl(whole, "cuda", partial(_by_kernel, kernel, one, shape))
    torch.library.impl(whole, "Autograd", partial(_differentiable, operator, gradients))
    torch.library.register_fake(whole, lambda a, *rest: a.new_empty(shape(a, *rest)))
    torch.library.register_vmap(whole, partial(_fold, operator, shape is not _shape_weight))
    return operator


_convolve = _define("convolve", _shape, _one, _gradients, "forward")
_convolve_input = _define("convolve_input", _shape_input, _one_input, _gradients_input, "input_gradient")
_convolve_weight = _define("convolve_weight", _shape_weight, _one_weight, _gradients_weight, "weight_gradient")

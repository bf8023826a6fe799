"""Convolutions under vmap, where every client has weights of its own.

On CUDA vmap turns them into one grouped convolution, which cuDNN runs at about half the speed of a plain one. Here
each becomes one of three operators: a convolution, its gradient with respect to the input, and its gradient with
respect to the weights. The operators take tensors with a client axis and with the channels last, and are kernels of
`conv_kernels`. Their vmap rule folds a new axis into the client axis, and the gradients of each operator are calls of
the other two. On other devices, and in exact arithmetic, torch's own convolution is used.
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

from equipoise.fast.materialise import below_autograd, materialised

Sizes = Sequence[int]
Operator = Callable[..., Tensor]


class Convolution(nn.Conv2d):
    """`nn.Conv2d` whose clients, stacked by vmap, can share one kernel launch."""

    padding: tuple[int, int]

    def forward(self, input: Tensor) -> Tensor:
        return conv2d(input, self.weight, self.bias, self.stride, self.padding)


def quicken(layer: nn.Module) -> None:
    """Turn a plain `nn.Conv2d` into a `Convolution`: one without groups and dilation, padded with zeros."""
    if (
        type(layer) is nn.Conv2d
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    ):
        layer.__class__ = Convolution  # the attributes are the same; only `forward` differs


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes) -> Tensor:
    """`torch.nn.functional.conv2d`; by our kernels where clients are stacked on CUDA and rounding may be coarser."""
    dtype = _kernel_dtype(x, weight)
    if dtype is None:
        return F.conv2d(x, weight, bias, stride, padding)
    y = stackable_conv2d(x.to(dtype), weight.to(dtype), stride, padding)
    return y if bias is None else y + bias.to(dtype).view(-1, 1, 1)


def _kernel_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The type in which our kernels compute this convolution; None where torch computes it."""
    if x.device.type != "cuda" or x.dim() != 4 or not torch._C._are_functorch_transforms_active():
        return None
    if torch.is_autocast_enabled("cuda"):
        return None if torch.float64 in (x.dtype, weight.dtype) else torch.get_autocast_dtype("cuda")
    if x.dtype != weight.dtype:
        return None
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.dtype if half or (x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32) else None


def stackable_conv2d(x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes) -> Tensor:
    """The convolution of one client by our operators. In memory the channels of the result are the last axis."""
    # Materialised, since the gradients read them too. Axes are added and removed by (un)squeeze: the gradient of
    # indexing would be a copy into a tensor of zeros.
    y = _convolve(
        materialised(_channels_last(x)).unsqueeze(0),
        materialised(_channels_last(weight)).unsqueeze(0),
        stride,
        padding,
    )
    return _channels_second(y.squeeze(0))


def _channels_last(values: Tensor) -> Tensor:
    """[n, channel, row, column] as a contiguous [n, row, column, channel]."""
    return values.permute(0, 2, 3, 1).contiguous()


def _channels_second(values: Tensor) -> Tensor:
    """[n, row, column, channel] as [n, channel, row, column], torch's order; a view."""
    return values.permute(0, 3, 1, 2)


# -- the three operators, on x[client, image, row, column, channel] and weight[client, filter, row, column, channel].
# For each operator: the shape of its output, one client's result by torch, and its gradients by the other two.


def _output_shape(x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes) -> tuple[int, ...]:
    both = zip(x.shape[2:4], weight.shape[2:4], stride, padding, strict=True)
    return (
        *x.shape[:2],
        *((size + 2 * pad - window) // step + 1 for size, window, step, pad in both),
        weight.shape[1],
    )


def _input_shape(g: Tensor, weight: Tensor, size: Sizes, stride: Sizes, padding: Sizes) -> tuple[int, ...]:
    return (*g.shape[:2], *size, weight.shape[-1])


def _weight_shape(g: Tensor, x: Tensor, size: Sizes, stride: Sizes, padding: Sizes) -> tuple[int, ...]:
    return (g.shape[0], g.shape[-1], *size, x.shape[-1])


def _torch_convolve(x: Tensor, weight: Tensor, stride: Any, padding: Any) -> Tensor:
    return F.conv2d(x, weight, None, stride, padding)


def _torch_input_gradient(g: Tensor, weight: Tensor, size: Sizes, stride: Any, padding: Any) -> Tensor:
    shape = (len(g), weight.shape[1], *size)
    gx: Tensor = conv2d_input(shape, weight, g, stride, padding)  # type: ignore[no-untyped-call]
    return gx


def _torch_weight_gradient(g: Tensor, x: Tensor, size: Sizes, stride: Any, padding: Any) -> Tensor:
    shape = (g.shape[1], x.shape[1], *size)
    gw: Tensor = conv2d_weight(x, shape, g, stride, padding)  # type: ignore[no-untyped-call]
    return gw


def _gradients(need: Sizes, g: Tensor, x: Tensor, weight: Tensor, *geometry: Sizes) -> tuple[Tensor | None, ...]:
    return (
        _input_gradient(g, weight, x.shape[2:4], *geometry) if need[0] else None,
        _weight_gradient(g, x, weight.shape[2:4], *geometry) if need[1] else None,
    )


def _gradients_of_input_gradient(
    need: Sizes, gx: Tensor, g: Tensor, weight: Tensor, _: Sizes, *geometry: Sizes
) -> tuple[Tensor | None, ...]:
    return (
        _convolve(gx, weight, *geometry) if need[0] else None,
        _weight_gradient(g, gx, weight.shape[2:4], *geometry) if need[1] else None,
    )


def _gradients_of_weight_gradient(
    need: Sizes, gw: Tensor, g: Tensor, x: Tensor, _: Sizes, *geometry: Sizes
) -> tuple[Tensor | None, ...]:
    return (
        _convolve(x, gw, *geometry) if need[0] else None,
        _input_gradient(g, gw, x.shape[2:4], *geometry) if need[1] else None,
    )


# -- implementations that the three operators share


def _run_torch(one_client: Operator, a: Tensor, b: Tensor, *rest: Sizes) -> Tensor:
    """Compute one client after another, by torch."""
    return torch.stack([
        _channels_last(one_client(_channels_second(its_a), _channels_second(its_b), *rest))
        for its_a, its_b in zip(a, b, strict=True)
    ])  # fmt: skip


def _run_kernel(kernel: str, one_client: Operator, shape: Callable[..., tuple[int, ...]], *given: Any) -> Tensor:
    """Compute all clients in one kernel launch. A single client is left to torch, which is no slower, and so are very
    large tensors: the kernels use 32-bit offsets within a client."""
    a, b, *rest = given
    largest = max(math.prod(size[1:]) for size in (a.shape, b.shape, shape(*given)))
    if len(a) == 1 or largest >= 1 << 31:
        return _run_torch(one_client, *given)
    from equipoise.fast import conv_kernels as kernels  # imported here: Triton is only installed where CUDA is

    run: Operator = getattr(kernels, kernel)
    # The kernels assume contiguous tensors, and would read wrong numbers from others.
    return run(a.contiguous(), b.contiguous(), shape(*given), *rest[-2:])


def _vmap_rule(operator: Operator, images: bool, info: Any, dims: Any, a: Tensor, b: Tensor, *rest: Sizes) -> Any:
    """Fold the axis that vmap adds into the client axis. If the first tensor of the operator has `images` and the
    second is shared along the new axis, fold it into the image axis instead."""
    added = info.batch_size
    if images and dims[1] is None:
        a = a.movedim(dims[0], 1)
        y = operator(a.flatten(1, 2).contiguous(), b, *rest)
        return y.reshape(y.shape[0], added, -1, *y.shape[2:]), 1
    a, b = (
        part.expand(added, *part.shape) if dim is None else part.movedim(dim, 0)
        for part, dim in zip((a, b), dims, strict=False)
    )
    y = operator(a.flatten(0, 1).contiguous(), b.flatten(0, 1).contiguous(), *rest)
    return y.reshape(added, -1, *y.shape[1:]), 0


class _Bilinear(_SingleLevelFunction):
    """Autograd of an operator that is linear in each of two tensors.

    It is a single-level function: the operator is dispatched once for every level of `torch.func`, and an ordinary
    `autograd.Function`, which handles all levels itself, would handle this level twice.
    """

    @staticmethod
    def forward(ctx: Any, operator: Operator, gradients: Any, a: Tensor, b: Tensor, *rest: Sizes) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        ctx.operator, ctx.gradients, ctx.rest = operator, gradients, rest
        with below_autograd():
            return operator(a, b, *rest)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        g = materialised(g.contiguous())  # since both gradients read it
        both = ctx.gradients(ctx.needs_input_grad[2:4], g, *ctx.saved_tensors, *ctx.rest)
        return None, None, *both, *[None] * len(ctx.rest)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, da: Tensor, db: Tensor, *rest: None) -> Tensor:
        a, b = ctx.saved_tensors
        tangent: Tensor = ctx.operator(da, b, *ctx.rest) + ctx.operator(a, db, *ctx.rest)
        return tangent


def _differentiable(operator: Operator, gradients: Any, *given: Any) -> Tensor:
    with enable_single_level_autograd_function():
        result: Tensor = _Bilinear.apply(operator, gradients, *given)  # type: ignore[attr-defined]
    return result


def _define(
    name: str, shape: Callable[..., tuple[int, ...]], one_client: Operator, gradients: Any, kernel: str
) -> Operator:
    """Register the operator `equipoise::name` for CPU, CUDA, autograd, tracing and vmap; `kernel` is the name of its
    function in `conv_kernels`."""
    full_name = f"equipoise::{name}"
    size = "" if shape is _output_shape else "int[] size, "
    # Inductor must pass the contiguous tensors that were asked for, and not a layout that it would prefer.
    exact = (torch.Tag.needs_exact_strides,)
    torch.library.define(full_name, f"(Tensor a, Tensor b, {size}int[] stride, int[] padding) -> Tensor", tags=exact)
    operator: Operator = getattr(torch.ops.equipoise, name).default
    torch.library.impl(full_name, "cpu", partial(_run_torch, one_client))
    torch.library.impl(full_name, "cuda", partial(_run_kernel, kernel, one_client, shape))
    torch.library.impl(full_name, "Autograd", partial(_differentiable, operator, gradients))
    torch.library.register_fake(full_name, lambda a, *rest: a.new_empty(shape(a, *rest)))
    torch.library.register_vmap(full_name, partial(_vmap_rule, operator, shape is not _weight_shape))
    return operator


_convolve = _define("convolve", _output_shape, _torch_convolve, _gradients, "forward")
_input_gradient = _define(
    "convolve_input", _input_shape, _torch_input_gradient, _gradients_of_input_gradient, "input_gradient"
)
_weight_gradient = _define(
    "convolve_weight", _weight_shape, _torch_weight_gradient, _gradients_of_weight_gradient, "weight_gradient"
)

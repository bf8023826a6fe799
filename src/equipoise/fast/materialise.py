"""An operator that makes inductor write a tensor to memory once.

Otherwise inductor may compute the tensor again, or write it again in another layout, for every kernel that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._guards import TracingContext
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

_NAME = "equipoise::materialised"
torch.library.define(_NAME, "(Tensor x) -> Tensor")
_operator = torch.ops.equipoise.materialised.default


def materialised(x: Tensor) -> Tensor:
    """`x`; in a compiled program it is written to memory once, and so is its gradient."""
    # In torch 2.11 `is_compiling()` is true while the program is traced, but no longer while its derivatives are; a
    # tracing context exists in both cases.
    compiling = torch.compiler.is_compiling() or TracingContext.try_get() is not None
    return _operator(x) if compiling else x


@contextmanager
def below_autograd() -> Iterator[None]:
    """Call operators below the autograd of the current level of `torch.func`, with the levels below it still on.

    Inside the forward of a custom function torch switches derivatives off. The next level, if there is one, needs
    them for gradients of gradients, which would otherwise silently be zero.
    """
    with torch.enable_grad(), _set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
        yield


class _Identity(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with below_autograd():
            return _operator(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _operator(g)  # type: ignore[no-any-return]

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        return _operator(dx)  # type: ignore[no-any-return]


def _differentiable(x: Tensor) -> Tensor:
    with enable_single_level_autograd_function():
        result: Tensor = _Identity.apply(x)  # type: ignore[attr-defined]
    return result


torch.library.impl(_NAME, "cpu", torch.clone)
torch.library.impl(_NAME, "cuda", torch.clone)
torch.library.impl(_NAME, "Autograd", _differentiable)
torch.library.register_fake(_NAME, torch.empty_like)
torch.library.register_vmap(_NAME, lambda info, dims, x: (_operator(x), dims[0]))


@cache
def register_inductor_lowering() -> None:
    """Make inductor write the operator's input to memory once, with the strides of its trace, and not copy it."""
    from torch._inductor.ir import BaseView, ExternKernel, Pointwise
    from torch._inductor.lowering import clone, register_lowering
    from torch._inductor.virtualized import V

    @register_lowering(_operator, type_promotion_kind=None)
    def lower_materialised(x: Any) -> Any:
        base: Any = x.data.unwrap_view() if isinstance(x.data, BaseView) else None
        if base is not None and isinstance(base.data, Pointwise):
            x = clone(x)  # write the view itself: inductor would choose an order of its own for the base
        # Fix the strides now: a layout that is left open may still change after other nodes have begun to read it.
        return ExternKernel.require_exact_strides(x, list(V.graph.current_node.meta["val"].stride()))

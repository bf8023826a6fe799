"""Tensors that are computed once: what a compiler would otherwise compute again, or write again, for each reader."""

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

_NAME = "equipoise::settled"
torch.library.define(_NAME, "(Tensor x) -> Tensor")
_operator = torch.ops.equipoise.settled.default


def settled(x: Tensor) -> Tensor:
    """The same values; and so its gradient."""
    # Torch 2.11 says that it compiles while it reads the program, but no longer while it writes out derivatives.
    compiling = torch.compiler.is_compiling() or TracingContext.try_get() is not None
    return _operator(x) if compiling else x


@contextmanager
def below() -> Iterator[None]:
    """At the next level of `torch.func`, if there is one: of gradients of gradients. It needs the derivatives that
    torch turns off within a function of one's own; without them they would silently be zero."""
    with torch.enable_grad(), _set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
        yield


class _Same(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with below():
            return _operator(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _operator(g)  # type: ignore[no-any-return]

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        return _operator(dx)  # type: ignore[no-any-return]


def _differentiable(x: Tensor) -> Tensor:
    with enable_single_level_autograd_function():
        result: Tensor = _Same.apply(x)  # type: ignore[attr-defined]
    return result


torch.library.impl(_NAME, "cpu", torch.clone)
torch.library.impl(_NAME, "cuda", torch.clone)
torch.library.impl(_NAME, "Autograd", _differentiable)
torch.library.register_fake(_NAME, torch.empty_like)
torch.library.register_vmap(_NAME, lambda info, dims, x: (_operator(x), dims[0]))


@cache
def tell_inductor() -> None:
    """To write such a tensor down once, laid out as it is said to be, and not to copy it."""
    from torch._inductor.ir import BaseView, ExternKernel, Pointwise
    from torch._inductor.lowering import clone, register_lowering
    from torch._inductor.virtualized import V

    @register_lowering(_operator, type_promotion_kind=None)
    def written(x: Any) -> Any:
        below: Any = x.data.unwrap_view() if isinstance(x.data, BaseView) else None
        if below is not None and isinstance(below.data, Pointwise):
            x = clone(x)  # as it is looked at: what lies below would be written in an order of its own
        # Left open, the layout may still change when others have begun to read it.
        return ExternKernel.require_exact_strides(x, list(V.graph.current_node.meta["val"].stride()))

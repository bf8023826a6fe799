"""Compiled functions. They are kept as long as the process lives: a second run of the same kind compiles nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from equipoise.core.client import Task
from equipoise.fast import dense_pass
from equipoise.fast.materialise import register_inductor_lowering

OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {
        "online_softmax": False,  # if on, inductor warns wherever it cannot use it
        "comprehensive_padding": False,  # our operators take contiguous tensors; padded ones would be copied for them
    }
}
_COMPILED: dict[Any, Callable[..., Any]] = {}


def compiled(
    function: Callable[..., Any], task: Task, backend: str, device: str, sizes_vary: bool = False
) -> Callable[..., Any]:
    """`function` with `task` as its first argument, compiled. Parameters and data are inputs, so that tasks with the
    same methods, settings and layers share one compiled function. If `sizes_vary`, one program serves several
    shapes."""
    key = (function.__name__, task.chain, task.local, task.autocast, task.network.kind, backend, device)
    # Every shape of every task is compiled separately, by intention. The limits are set in every call, since every
    # thread has its own.
    limits = torch._dynamo.config
    if limits.recompile_limit < 1024 or limits.accumulated_recompile_limit < 4096:
        limits.recompile_limit, limits.accumulated_recompile_limit = 1024, 4096
    if key not in _COMPILED:
        of_task: Callable[..., Any] = partial(function, task)
        options, dynamic = OPTIONS.get(backend), None if sizes_vary else False
        if backend == "inductor":
            register_inductor_lowering()
            options = {"post_grad_custom_post_pass": dense_pass.inductor_pass(), **OPTIONS[backend]}
            if device == "cpu":  # on a GPU programs are recorded, and a replay checks no guards
                of_task, options["guard_filter_fn"] = _with_own_code_object(of_task), _guards_to_keep
        _COMPILED[key] = torch.compile(of_task, dynamic=dynamic, fullgraph=True, backend=backend, options=options)
    return _COMPILED[key]


def _guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Which guards torch should check before each call: those on the arguments, whose names begin with `given` (see
    `_with_own_code_object`), and those on settings of torch, which have no name. Guards on the task are dropped: the
    task is always the one that was compiled, and checking all its parts takes a tenth of a small step."""
    return [guard.name.startswith("given") or not guard.name for guard in guards]


def _with_own_code_object(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object that no other function has. Torch caches programs by code object, and
    finds the right one of the same code object by its guards, of which those on the task were dropped."""

    def call(*given: Any) -> Any:
        return function(*given)

    call.__code__ = call.__code__.replace()
    return call

"""What is compiled is kept as long as the process lives: a second run of the same kind does not compile again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from equipoise import dense
from equipoise.local import Task
from equipoise.settled import tell_inductor

OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {
        "online_softmax": False,  # else it warns where it does without
        "comprehensive_padding": False,  # our operators take what lies without gaps, and would have it copied
    }
}
_COMPILED: dict[Any, Callable[..., Any]] = {}


def compiled(function: Callable[..., Any], task: Task, backend: str, sizes_vary: bool = False) -> Callable[..., Any]:
    """A function of a task, compiled; for the first task of its kind. Parameters and data are inputs, so that tasks
    with the same methods, settings and layers share one program. If `sizes_vary`, one serves several shapes."""
    key = (function.__name__, task.chain, task.local, task.autocast, task.network.kind, backend)
    # Each shape of each task is a program of its own, by intention. Every thread has settings of its own.
    limits = torch._dynamo.config
    if limits.recompile_limit < 1024 or limits.accumulated_recompile_limit < 4096:
        limits.recompile_limit, limits.accumulated_recompile_limit = 1024, 4096
    if key not in _COMPILED:
        options, dynamic = OPTIONS.get(backend), None if sizes_vary else False
        if backend == "inductor":
            tell_inductor()
            options = {"post_grad_custom_post_pass": dense.the_pass(), **OPTIONS[backend]}
        _COMPILED[key] = torch.compile(
            partial(function, task), dynamic=dynamic, fullgraph=True, backend=backend, options=options
        )
    return _COMPILED[key]

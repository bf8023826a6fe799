"""What is compiled is kept as long as the process lives: a second run of the same kind does not compile again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from equipoise import descent
from equipoise.local import Task
from equipoise.settled import tell_inductor

OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {
        "online_softmax": False,  # else it warns where it does without
        "comprehensive_padding": False,  # our operators take what lies without gaps, and would have it copied
    }
}
_COMPILED: dict[Any, Callable[..., Any]] = {}


def compiled(function: Callable[..., Any], task: Task, backend: str) -> Callable[..., Any]:
    """A function of a task, compiled; for the first task of its kind. Parameters and data are inputs, so that tasks
    with the same methods, settings and layers share one program."""
    key = (function.__name__, task.chain, task.local, task.autocast, task.network.kind, backend)
    # Each shape of each task is a program of its own, by intention. Every thread has settings of its own.
    limits = torch._dynamo.config
    if limits.recompile_limit < 1024 or limits.accumulated_recompile_limit < 4096:
        limits.recompile_limit, limits.accumulated_recompile_limit = 1024, 4096
    if key not in _COMPILED:
        options = OPTIONS.get(backend)
        if backend == "inductor":
            tell_inductor()
            options = {"post_grad_custom_post_pass": descent.the_pass(), **OPTIONS[backend]}
        _COMPILED[key] = torch.compile(
            partial(function, task), dynamic=False, fullgraph=True, backend=backend, options=options
        )
    return _COMPILED[key]

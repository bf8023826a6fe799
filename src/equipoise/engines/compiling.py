"""Compiled steps, kept as long as the process lives: a second run of the same kind does not compile again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from equipoise.local import Task

_STEPS: dict[Any, Callable[..., Any]] = {}


def compiled(step: Callable[..., Any], task: Task, backend: str) -> Callable[..., Any]:
    """`step` for a task, compiled; for the first task of its kind. Parameters and data are inputs, so that tasks with
    the same methods, settings and layers share one program."""
    key = (task.chain, task.local, task.autocast, task.network.kind, backend)
    if key not in _STEPS:
        # Each shape of each task is a program of its own, by intention.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 1024)
        torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, 4096)
        _STEPS[key] = torch.compile(partial(step, task), dynamic=False, fullgraph=True, backend=backend)
    return _STEPS[key]

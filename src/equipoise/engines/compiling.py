"""What is compiled is kept as long as the process lives: a second run of the same kind does not compile again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def compiled(
    function: Callable[..., Any], task: Task, backend: str, device: str, sizes_vary: bool = False
) -> Callable[..., Any]:
    """A function of a task, compiled; for the first task of its kind. Parameters and data are inputs, so that tasks
    with the same methods, settings and layers share one program. If `sizes_vary`, one serves several shapes."""
    key = (function.__name__, task.chain, task.local, task.autocast, task.network.kind, backend, device)
    # Each shape of each task is a program of its own, by intention. Every thread has settings of its own.
    limits = torch._dynamo.config
    if limits.recompile_limit < 1024 or limits.accumulated_recompile_limit < 4096:
        limits.recompile_limit, limits.accumulated_recompile_limit = 1024, 4096
    if key not in _COMPILED:
        of_task: Callable[..., Any] = partial(function, task)
        options, dynamic = OPTIONS.get(backend), None if sizes_vary else False
        if backend == "inductor":
            tell_inductor()
            options = {"post_grad_custom_post_pass": dense.the_pass(), **OPTIONS[backend]}
            if device == "cpu":  # on a GPU programs are recorded, and nothing is checked when they are replayed
                of_task, options["guard_filter_fn"] = _with_code_of_its_own(of_task), _that_may_change
        _COMPILED[key] = torch.compile(of_task, dynamic=dynamic, fullgraph=True, backend=backend, options=options)
    return _COMPILED[key]


def _that_may_change(guards: Sequence[Any]) -> list[bool]:
    """Of what torch would check before each call: only its arguments, and settings of torch, which have no name. The
    task is always the one that was compiled, and to look at all it is made of takes a tenth of a small step."""
    return [guard.name.startswith("given") or not guard.name for guard in guards]


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Torch keeps programs by the code they were made from, and tells those of one code apart by what it checks."""

    def call(*given: Any) -> Any:
        return function(*given)

    call.__code__ = call.__code__.replace()
    return call

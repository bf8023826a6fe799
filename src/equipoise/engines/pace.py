"""Whether compiling is worth its time. Decided from what a run is, never from a clock: the same config must give the
same plan, and so the same bits, on a busy machine and on an idle one."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from equipoise import tree
from equipoise.engines.parts import few
from equipoise.federation import Federation
from equipoise.local import Local
from equipoise.network import Context

SWITCH = 3  # the round that is the first to be compiled: until then a run has shown that it works
# What was measured without compiling: the share of a round that a compiled program saves, at least, on CPU and GPU;
# operations per second of a core, and of a GPU; and on a GPU seconds of a step, bytes per second, how many times a
# step goes over the parameters, and how many more if it clips.
SAVED, SAVED_GPU = 0.3, 0.5
CORE, GPU = 18e9, 20e12
STEP, BYTES, PASSES, CLIPPING = 2e-4, 3.5e12, 12, 40
LATENCY = 6e-5  # seconds of a step of one client on a GPU, compiled


def compile_from(fed: Federation, local: Local, rounds: int, device: str, threads: int) -> int | None:
    """The round from which on to compile; None where the run is too short for it."""
    saved = SAVED_GPU if device.startswith("cuda") else SAVED
    worth = saved * round_seconds(fed, local, device, threads) * (rounds - SWITCH)
    return SWITCH if worth > _cost(fed, device) * _widths(fed, local, device) else None


def round_seconds(fed: Federation, local: Local, device: str, threads: int) -> float:
    """About how long a round takes that is not compiled."""
    cohort = fed.draw(0)
    n = fed.offsets[cohort + 1] - fed.offsets[cohort]
    operations = 3.0 * _operations(fed) * int(n.sum()) * local.epochs  # forward, and backward twice as much
    if device.startswith("cuda"):
        steps = local.batches(n)[1]
        passes = PASSES + (CLIPPING if local.clip else 0)
        moved = passes * tree.nbytes(fed.network.params) * int(steps.sum())
        return STEP * int(steps.max()) + moved / BYTES + operations / GPU
    return operations / (CORE * threads)


def crowd(fed: Federation, local: Local) -> int:
    """About how many clients a GPU trains in the time of one."""
    n = fed.offsets.diff()
    batch = int(torch.minimum(local.batches(n)[0], n).max())
    each = PASSES * tree.nbytes(fed.network.params) / BYTES + 3.0 * _operations(fed) * batch / GPU
    return max(1, int(LATENCY / each))


def _widths(fed: Federation, local: Local, device: str) -> int:
    """Of batches: each is a program of its own, and a batch of all of a client's samples has almost any."""
    if device.startswith("cuda") and local.batch != "full" and local.steps_per_epoch is None:
        return 1  # then all clients train with the widest
    n = fed.offsets.diff()
    widths = torch.minimum(local.batches(n)[0], n)
    return len({few(width, int(widths.max()), 1) for width in set(widths.tolist())})


def _operations(fed: Federation) -> int:
    """Of the model for one sample."""
    x = fed.features(torch.device("cpu"), torch.float32)(fed.x[:1].cpu())
    context = Context(torch.ones(1, dtype=torch.bool), torch.zeros((), dtype=torch.int64), False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        fed.network(fed.network.params, fed.network.buffers, x, context)
    return int(counter.get_total_flops())


def _cost(fed: Federation, device: str) -> float:
    """Seconds that compiling takes: more for more layers."""
    tensors = sum(1 for _ in tree.leaves(fed.network.params))
    return 10 + 0.5 * tensors if device.startswith("cuda") else 6 + 1.0 * tensors

"""Estimates of how long a round takes, from which it follows whether compiling is worth its time.

They depend on the config and the data alone, never on a clock: the same config must give the same plan, and so the
same bits, on a busy machine and on an idle one.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from equipoise.core import tree
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.network import Context
from equipoise.fast.schedule import bucket

FIRST_COMPILED = 3  # the first round to be compiled, if any: by then a run has shown that it works
# Measured, with rounds that are not compiled:
SAVED_CPU, SAVED_GPU = 0.3, 0.5  # the share of a round's time that compiling saves, at least
CORE_FLOPS, GPU_FLOPS = 18e9, 20e12  # operations per second of a CPU core and of a GPU
GPU_STEP_SECONDS = 2e-4  # of one step, whatever its size
GPU_BYTES = 3.5e12  # bytes per second that a GPU moves
PASSES, CLIPPING_PASSES = 12, 40  # how often a step goes over all parameters; and how often more if it clips
GPU_LATENCY = 6e-5  # seconds of a compiled step of one client


def compile_from(fed: Federation, local: Local, rounds: int, device: str, threads: int) -> int | None:
    """The first round to compile; None where the run is too short for compiling to pay."""
    saved = SAVED_GPU if device.startswith("cuda") else SAVED_CPU
    worth = saved * round_seconds(fed, local, device, threads) * (rounds - FIRST_COMPILED)
    return FIRST_COMPILED if worth > _compile_seconds(fed, device) * _batch_widths(fed, local, device) else None


def round_seconds(fed: Federation, local: Local, device: str, threads: int) -> float:
    """About how long a round takes that is not compiled."""
    cohort = fed.draw(0)
    n = fed.offsets[cohort + 1] - fed.offsets[cohort]
    operations = 3.0 * _sample_flops(fed) * int(n.sum()) * local.epochs  # forward, and backward twice as much
    if device.startswith("cuda"):
        steps = local.batches(n)[1]
        passes = PASSES + (CLIPPING_PASSES if local.clip else 0)
        moved = passes * tree.nbytes(fed.network.params) * int(steps.sum())
        return GPU_STEP_SECONDS * int(steps.max()) + moved / GPU_BYTES + operations / GPU_FLOPS
    return operations / (CORE_FLOPS * threads)


def latency_clients(fed: Federation, local: Local) -> int:
    """About how many clients a GPU trains in the time of one: a step of up to so many takes as long as its launches,
    one of more as long as its data and operations."""
    n = fed.offsets.diff()
    batch = int(torch.minimum(local.batches(n)[0], n).max())
    each = PASSES * tree.nbytes(fed.network.params) / GPU_BYTES + 3.0 * _sample_flops(fed) * batch / GPU_FLOPS
    return max(1, int(GPU_LATENCY / each))


def _batch_widths(fed: Federation, local: Local, device: str) -> int:
    """How many batch widths there will be, each of which is compiled. Where a batch is all of a client's samples,
    almost any width occurs."""
    if device.startswith("cuda") and local.batch != "full" and local.steps_per_epoch is None:
        return 1  # on a GPU all clients are then padded to the widest batch
    n = fed.offsets.diff()
    widths = torch.minimum(local.batches(n)[0], n)
    return len({bucket(width, int(widths.max()), 1) for width in set(widths.tolist())})


def _sample_flops(fed: Federation) -> int:
    """The floating-point operations of the model for one sample, forward."""
    x = fed.inputs(torch.device("cpu"), torch.float32)(fed.x[:1].cpu())
    context = Context(torch.ones(1, dtype=torch.bool), torch.zeros((), dtype=torch.int64), False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        fed.network(fed.network.params, fed.network.buffers, x, context)
    return int(counter.get_total_flops())


def _compile_seconds(fed: Federation, device: str) -> float:
    """About how long compiling takes: longer for more layers."""
    tensors = sum(1 for _ in tree.leaves(fed.network.params))
    return 10 + 0.5 * tensors if device.startswith("cuda") else 6 + 1.0 * tensors

"""How a run is executed on this machine: device, precision, compilation and engine."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from equipoise.core import speed
from equipoise.core.chain import Chain
from equipoise.core.engine import Seat
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.engines import Serial, stacked_engine
from equipoise.engines.stacked import Stacked
from equipoise.methods.registry import parse
from equipoise.runs.baselines import CENTRALISED, LOCAL
from equipoise.runs.config import Config


def device_of(config: Config) -> str:
    """Return the device of a run; `auto` is CUDA where there is a GPU, else the CPU."""
    device = config.train.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.device = {device!r}: torch finds no CUDA device here; expected cpu or auto")
    return device


def execution_plan(config: Config, fed: Federation, seat: Seat | None = None) -> dict[str, Any]:
    """Return how a run is executed: all that must stay the same for a resumed run to end in the same bits."""
    train, device = config.train, device_of(config)
    threads = train.threads or torch.get_num_threads()
    return {
        "engine": train.engine,
        "device": device,
        "precision": _precision(train.precision, device),
        "compile_from": _compile_from(config, fed, device, threads),
        "threads": threads,
        "torch": torch.__version__,
        "fast": speed.off() is None,
        "machine": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
        "block": train.block,
        "together": 1 if seat is None else seat.runs,
    }


def _compile_from(config: Config, fed: Federation, device: str, threads: int) -> int | None:
    """Return the first round that is compiled, or None if none is."""
    train = config.train
    if train.compile is True and (why := speed.off()) is not None:
        raise ConfigError(f"train.compile = true: the fast code that compiles is off, since {why}; expected auto")
    if train.compile != "auto":
        return 0 if train.compile else None
    if train.engine != "stacked" or config.method == LOCAL:
        return None
    compile_from = speed.faster("compile from", _never)
    return compile_from(fed, chain_of(config).local(fed.local), train.rounds, device, threads)


def _never(fed: Federation, local: Local, rounds: int, device: str, threads: int) -> int | None:
    """Stands in for the fast code where that is off: nothing is compiled."""
    return None


def chain_of(config: Config) -> Chain:
    """Return the methods of a config. The baseline `centralised` is plain averaging with a single client."""
    return Chain() if config.method == CENTRALISED else parse(config.method)


def _precision(setting: str, device: str) -> str:
    if setting != "auto":
        return setting
    return "tf32" if device.startswith("cuda") else "float32"


def prepare_torch(plan: dict[str, Any]) -> None:
    """Set torch's threads, and make its results on the plan's device the same bits every time."""
    torch.set_num_threads(plan["threads"])
    if plan["device"].startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
        torch.use_deterministic_algorithms(True)
        # Filling would launch a kernel for each new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        tf32 = plan["precision"] in ("tf32", "bf16")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32


def make_engine(
    plan: dict[str, Any], fed: Federation, memory_gib: float, seat: Seat | None = None
) -> Serial | Stacked:
    """Build the engine of a plan. `compile_from` and `seat` are for the fast engine only."""
    options = {"device": plan["device"], "precision": plan["precision"], "memory_gib": memory_gib}
    if plan["engine"] == "serial":
        return Serial(fed, **options)
    if speed.off() is None:
        options |= {"compile_from": plan["compile_from"], "seat": seat}
    return stacked_engine()(fed, width=plan.get("block"), **options)

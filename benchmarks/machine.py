"""The machine and the versions with which something was measured."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

import equipoise

ROOT = Path(__file__).parent.parent


def resolved(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe(device: str) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else _processor(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "equipoise": equipoise.__version__,
        },
    }


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_mib(device: str) -> float:
    """The most memory that this process has held: on CUDA memory of the device, otherwise main memory."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit that was measured, with a + if the working tree differs from it; None where it is unknown."""
    try:
        head, changes = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "src", "benchmarks"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if changes else head

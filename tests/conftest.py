"""One thread per test process: the tests run two processes at a time on two cores."""

import contextlib
import os

# Some virtual machines announce matrix tiles (AMX) and then refuse them: bfloat16 must do without in the tests.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

torch.set_num_threads(1)

with contextlib.suppress(ModuleNotFoundError):  # only the tests of properties need hypothesis
    from hypothesis import HealthCheck, settings

    # Every run tries the same examples, and a busy machine fails no test.
    settings.register_profile(
        "repeatable",
        derandomize=True,
        deadline=None,
        max_examples=50,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A model built in a test starts from the same weights whichever tests ran before it in the process."""
    torch.manual_seed(0)

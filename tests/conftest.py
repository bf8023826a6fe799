"""One thread per test process: the tests run two processes at a time on two cores."""

import os

# Some virtual machines announce matrix tiles (AMX) and then refuse them: bfloat16 must do without in the tests.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A model built in a test starts from the same weights whichever tests ran before it in the process."""
    torch.manual_seed(0)

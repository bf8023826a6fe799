"""One thread per test process: the tests run two processes at a time on two cores."""

import os

# Some virtual machines announce matrix tiles (AMX) and then refuse them: bfloat16 must do without in the tests.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

torch.set_num_threads(1)

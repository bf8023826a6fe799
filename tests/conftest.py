"""One thread per test process: the tests run two processes at a time on two cores."""

import torch

torch.set_num_threads(1)

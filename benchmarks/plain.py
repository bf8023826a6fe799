"""The same work in plain PyTorch: centralised training, the bound on what a simulation can reach, and a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.work import CLASSES, Work
from equipoise import models
from equipoise.data.dataset import CONSTANTS

Rounds = Callable[[int], None]  # carries out the given number of rounds


class Plain:
    """One network, its optimiser, and all samples on the device."""

    def __init__(self, work: Work, device: str, best: bool = False) -> None:
        self.work, self.device, self.best = work, torch.device(device), best
        self.precision = work.precision_on(device)
        torch.manual_seed(0)
        self.module = models.build(work.model, work.shape, CLASSES, **work.options).to(self.device)
        if best:
            self.module.to(memory_format=torch.channels_last)
        arrays = work.arrays()
        self.x, self.y = (torch.from_numpy(arrays[name]).to(self.device) for name in ("x", "y"))
        self.mean, self.std = (torch.tensor(c, device=self.device).view(-1, 1, 1) for c in CONSTANTS[work.normalise])
        self.criterion = nn.CrossEntropyLoss()
        self.optimiser = torch.optim.SGD(self.module.parameters(), lr=work.lr, fused=best or None)
        self.loss = torch.compile(self._loss, dynamic=False) if best else self._loss

    def _loss(self, rows: Tensor) -> Tensor:
        x = (self.x[rows].float() / 255 - self.mean) / self.std
        if self.best:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            loss: Tensor = self.criterion(self.module(x), self.y[rows])
        return loss

    def step(self, rows: Tensor) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        self.loss(rows).backward()
        self.optimiser.step()

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Settings of torch for a plain program. It need not give the same bits again, as a run of Equipoise must."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        exact = torch.are_deterministic_algorithms_enabled()
        before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
        torch.use_deterministic_algorithms(False)
        cudnn.allow_tf32 = matmul.allow_tf32 = self.precision in ("tf32", "bf16")
        cudnn.benchmark = self.best
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(exact)
            cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before


def centralised(work: Work, device: str, how: str = "eager") -> Rounds:
    """One model, trained for as many steps as a client takes, each on the batches of all clients at once.

    `how`: "eager"; "graph", with the whole round recorded as a CUDA graph; "best", the same with a compiled model in
    channels-last layout.
    """
    plain = Plain(work, device, best=how == "best")
    size = work.batch * (work.cohort or work.clients)

    def order() -> Tensor:
        return torch.randperm(work.pool, device=device)[: work.cohort_samples]

    def eager() -> None:
        for rows in order().split(size):
            plain.step(rows)

    with plain.settings():
        one_round = eager if how == "eager" else _recorded(plain, order, size)
        one_round()
    return _repeated(plain, one_round)


def _recorded(plain: Plain, order: Callable[[], Tensor], size: int) -> Callable[[], None]:
    chosen = order()

    def steps() -> None:
        for rows in chosen.split(size):
            plain.step(rows)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            steps()
    torch.cuda.current_stream().wait_stream(side)
    plain.optimiser.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()

    def replay() -> None:
        chosen.copy_(order())
        graph.replay()

    return replay


def loop(work: Work, device: str) -> Rounds:
    """FedAvg as one writes it without a library: one client after another, with all samples on the device."""
    plain = Plain(work, device)
    start = {name: value.clone() for name, value in plain.module.state_dict().items()}
    parts = torch.randperm(work.pool, device=device).view(work.clients, work.samples)

    def visit(client: int) -> dict[str, Any]:
        plain.module.load_state_dict(start)
        mine = parts[client][torch.randperm(work.samples, device=device)]
        for rows in mine.split(work.batch):
            plain.step(rows)
        state: dict[str, Any] = plain.module.state_dict()
        return state

    def one_round() -> None:
        cohort = torch.randperm(work.clients)[: work.cohort or work.clients].tolist()
        mean = {name: torch.zeros_like(value) for name, value in start.items() if value.is_floating_point()}
        for client in cohort:
            after = visit(client)
            for name in mean:
                mean[name] += after[name] / len(cohort)
        start.update(mean)

    with plain.settings():
        visit(0)
    return _repeated(plain, one_round)


def _repeated(plain: Plain, one_round: Callable[[], None]) -> Rounds:
    def rounds(count: int) -> None:
        with plain.settings():
            for _ in range(count):
                one_round()

    return rounds

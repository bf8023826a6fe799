"""FedLab's standalone simulation: a serial trainer of clients and a synchronous server, as in its tutorials."""

from __future__ import annotations

import logging
from importlib.metadata import version

import torch
from baton import Task, turns
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from network import mlp
from torch.utils.data import DataLoader, TensorDataset

task = Task.given()


class Clients:
    """What the library calls a FedDataset, the base class of which needs torchvision.

    All samples are in memory, and loaders have no workers, which small data sets would only wait for.
    """

    def __init__(self) -> None:
        x, y = (torch.from_numpy(array) for array in task.arrays())
        self.parts = [TensorDataset(x[client], y[client]) for client in range(task.clients)]

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
        return DataLoader(self.parts[id], batch_size=batch_size, shuffle=True)


logging.disable(logging.INFO)
trainer = FedAvgSerialClientTrainer(mlp(task), task.clients)
trainer.setup_dataset(Clients())
trainer.setup_optim(1, task.batch, task.lr)
handler = FedAvgServerHandler(mlp(task), global_round=10**9, sample_ratio=1.0)
handler.num_clients = task.clients

for rounds in turns(version("fedlab")):
    for _ in range(rounds):
        clients = handler.sample_clients()
        trainer.local_process(handler.downlink_package, clients)
        for upload in trainer.uplink_package:
            handler.load(upload)

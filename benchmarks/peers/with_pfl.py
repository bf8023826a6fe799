"""pfl-research's simulation, set up as its CIFAR10 benchmark does, in as many processes as torchrun starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as group
from baton import Task, turns
from network import mlp
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel

task = Task.given()
x, y = (torch.from_numpy(array) for array in task.arrays())


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.criterion = mlp(task), torch.nn.CrossEntropyLoss()

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> Any:
        self.train(not eval)
        return self.criterion(self.layers(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict[str, Any]:
        return {}


def user(client: str) -> Dataset:
    order = torch.randperm(task.samples)
    return Dataset((x[int(client)][order], y[int(client)][order]), user_id=client)


def turns_of_all() -> Iterator[int]:
    """The first process is told how many rounds to carry out, and tells the others."""
    number = torch.zeros(1, dtype=torch.int64)
    told = turns(version("pfl")) if group.get_rank() == 0 else None
    while True:
        if told is not None:
            number.fill_(next(told, 0))
        group.broadcast(number, 0)
        if not number:
            return
        yield int(number)


users = [str(client) for client in range(task.clients)]
federation = FederatedDataset(user, get_user_sampler("minimize_reuse", users))
network = Network()
model = PyTorchModel(
    model=network,
    local_optimizer_create=torch.optim.SGD,
    central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
)
backend = SimulatedBackend(training_data=federation, val_data=None, postprocessors=[WeightByDatapoints()])
train = NNTrainHyperParams(local_batch_size=task.batch, local_num_epochs=1, local_learning_rate=task.lr)
asyncio.set_event_loop(asyncio.new_event_loop())  # which the library expects to find

for rounds in turns_of_all():
    model = FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=task.clients,
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=train,
        model_eval_params=NNEvalHyperParams(local_batch_size=task.batch),
        send_metrics_to_platform=False,
    )

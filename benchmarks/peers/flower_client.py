"""The client half of `with_flower`, in a module of its own: Ray's workers import it instead of being sent it."""

from __future__ import annotations

from functools import cache

import torch
from baton import Task
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from network import mlp
from torch import nn

client = ClientApp()
task = Task.given()


@cache
def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Read once by every worker, and not in every round."""
    x, y = task.arrays()
    return torch.from_numpy(x), torch.from_numpy(y)


@client.train()
def train(message: Message, context: Context) -> Message:
    model = mlp(task)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = (part[int(context.node_config["partition-id"])] for part in samples())
    optimiser, loss = torch.optim.SGD(model.parameters(), lr=task.lr), nn.CrossEntropyLoss()
    for rows in torch.randperm(task.samples).split(task.batch):
        optimiser.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": task.samples})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

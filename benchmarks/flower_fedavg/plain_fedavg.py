"""FedAvg as Flower offers it, with a plain PyTorch client: what a careful user of Flower writes."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

LR, BATCH, HELD_OUT = 0.05, 32, 0.2

client = ClientApp()
server = ServerApp()


def network(context: Context) -> nn.Module:
    sizes = [64, *(int(size) for size in str(context.run_config["hidden"]).split(",")), 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def samples(context: Context) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A site's samples, and how many of them it trains on."""
    file = sorted(Path(str(context.run_config["parts"])).glob("*.npz"))[int(context.node_config["partition-id"])]
    arrays = np.load(file)
    x = torch.from_numpy(arrays["x"]).float() / 255
    return x, torch.from_numpy(arrays["y"]), int(len(x) * (1 - HELD_OUT))


@client.train()
def train(message: Message, context: Context) -> Message:
    model = network(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y, count = samples(context)
    optimiser, loss = torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss()
    for rows in torch.randperm(count).split(BATCH):
        optimiser.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimiser.step()
    records = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": count})}
    return Message(RecordDict(records), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = network(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y, count = samples(context)
    with torch.no_grad():
        right = (model(x[count:]).argmax(1) == y[count:]).float().mean()
    metrics = MetricRecord({"num-examples": len(y) - count, "accuracy": float(right)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    times = Path(str(context.run_config["times"]))

    def note(round: int, arrays: ArrayRecord) -> MetricRecord:
        with times.open("a") as file:
            file.write(f"{time.time()}\n")
        return MetricRecord({})

    FedAvg(min_train_nodes=3, min_evaluate_nodes=3, min_available_nodes=3).start(
        grid,
        ArrayRecord(network(context).state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=note,
    )

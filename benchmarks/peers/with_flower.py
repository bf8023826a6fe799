"""Flower's simulation: its FedAvg, and clients in Ray's workers, one core each."""

from __future__ import annotations

from importlib.metadata import version

from baton import Task, turns
from flower_client import client
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from network import mlp

task = Task.given()
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=task.clients, min_available_nodes=task.clients)
    arrays = ArrayRecord(mlp(task).state_dict())
    for rounds in turns(version("flwr")):
        arrays = strategy.start(grid, arrays, num_rounds=rounds).arrays


run_simulation(
    server, client, num_supernodes=task.clients, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
)

"""One round on this machine: the stacked engine against a plain PyTorch loop and against centralised training.

    python benchmarks/round.py [--device cuda] [--rounds 5] [--json benchmarks/results/round-cpu.json]

All in one run, on the same samples: MLP 784-128-128-10, 100 clients of 600 samples, batches of 32, one epoch.
The figures interleave, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import equipoise as eq
from equipoise.federation import Federation
from equipoise.network import Network

CLIENTS, SAMPLES, BATCH, LR = 100, 600, 32, 0.05


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return eq.models.build("mlp", (1, 28, 28), 10)


def federation(module: nn.Module) -> Federation:
    draw = torch.Generator().manual_seed(1)
    total = CLIENTS * SAMPLES
    return Federation(
        network=Network(module),
        x=torch.randint(0, 256, (total, 1, 28, 28), dtype=torch.uint8, generator=draw),
        y=torch.randint(0, 10, (total,), generator=draw),
        offsets=torch.arange(CLIENTS + 1) * SAMPLES,
        indices=torch.randperm(total, generator=draw),
        classes=tuple("0123456789"),
        mean=(0.1307,),
        std=(0.3081,),
        local=eq.Local(lr=LR, batch=BATCH),
    )


def plain_loop(fed: Federation, module: nn.Module, device: str) -> Callable[[], None]:
    """What a careful person writes without a library: one model, clients one after another, data on the device."""
    module = module.to(device)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    features = fed.features(torch.device(device), torch.float32)
    x, y = features(fed.x.to(device)), fed.y.to(device)
    optimiser, loss = torch.optim.SGD(module.parameters(), lr=LR), nn.CrossEntropyLoss()
    indices = fed.indices.to(device)

    def one_round() -> None:
        mean = {name: torch.zeros_like(value) for name, value in start.items()}
        for client in range(CLIENTS):
            module.load_state_dict(start)
            mine = indices[client * SAMPLES : (client + 1) * SAMPLES]
            mine = mine[torch.randperm(SAMPLES, device=device)]
            for rows in mine.split(BATCH):
                optimiser.zero_grad(set_to_none=True)
                loss(module(x[rows]), y[rows]).backward()
                optimiser.step()
            for name, value in module.state_dict().items():
                mean[name] += value / CLIENTS
        start.update(mean)

    return one_round


def centralised(fed: Federation, module: nn.Module, device: str) -> Callable[[], None]:
    """The bound: as many steps as a client takes, on the samples of the whole cohort at once, with one model."""
    module = module.to(device)
    features = fed.features(torch.device(device), torch.float32)
    x, y = fed.x.to(device), fed.y.to(device)
    optimiser, loss = torch.optim.SGD(module.parameters(), lr=LR), nn.CrossEntropyLoss()

    def one_round() -> None:
        for rows in torch.randperm(len(y), device=device).split(BATCH * CLIENTS):
            optimiser.zero_grad(set_to_none=True)
            loss(module(features(x[rows])), y[rows]).backward()
            optimiser.step()

    return one_round


def stacked(fed: Federation, device: str, **options: object) -> Callable[[], None]:
    engine = eq.Stacked(fed, device=device, **options)
    chain = eq.Chain()
    states = [eq.start(fed, chain, engine)]

    def one_round() -> None:
        states[0], _ = eq.one_round(states[0], fed, chain, engine)

    return one_round


def measure(jobs: dict[str, Callable[[], None]], device: str, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            began = time.perf_counter()
            job()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="also the compiled stacked engine")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    fed = federation(mlp())
    jobs = {
        "plain loop over clients": plain_loop(fed, mlp(), given.device),
        "centralised, same samples": centralised(fed, mlp(), given.device),
        "stacked": stacked(fed, given.device),
    }
    if given.compile:
        jobs["stacked, compiled"] = stacked(fed, given.device, compile=True)
    seconds = measure(jobs, given.device, given.rounds)
    loop, bound = seconds["plain loop over clients"], seconds["centralised, same samples"]
    result = {
        "command": f"python benchmarks/round.py --device {given.device} --rounds {given.rounds}"
        + (" --compile" if given.compile else ""),
        "job": f"MLP 784-128-128-10, {CLIENTS} clients x {SAMPLES}, batch {BATCH}, one epoch, float32",
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "equipoise": eq.__version__,
        "seconds_per_round": seconds,
        "times_faster_than_plain_loop": {name: loop / value for name, value in seconds.items()},
        "share_of_centralised": {name: bound / value for name, value in seconds.items()},
    }
    print(f"{result['job']}\n{result['device']}, torch {torch.__version__}, {result['threads']} threads")
    for name, value in seconds.items():
        print(f"{name:28} {1000 * value:9.1f} ms a round   {loop / value:6.1f} x the plain loop")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

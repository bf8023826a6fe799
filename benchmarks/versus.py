"""Two states of the code against each other: rounds of the same trainings, in alternating turns on one machine.

    python -m benchmarks.versus OLD NEW --turns 5 --out versus.json     # each a folder with the package `equipoise`

Every job has a process for the old code, a second one for the old code and one for the new code. They take turns, so
that a change of the machine's speed meets all three alike, and the two old ones show how far equal code differs. Only
public names are used, so that the same file serves both states of the code.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

JOBS = {
    "mlp": ("mlp", "fedavg"),
    "cnn": ("cnn", "fedavg"),
    "chains, scaffold": ("mlp", "scaffold"),
    "chains, fedshift": ("mlp", "fedshift"),
    "chains, climb": ("mlp", "climb"),
}
SECONDS = 4.0  # of a turn, about


def serve(network: str, method: str, device: str) -> None:
    """The process of one contestant: reads a number of rounds from standard input, answers with their seconds."""
    import numpy as np
    import torch

    import equipoise as eq

    draw = np.random.default_rng(0)
    clients, samples, shape, batch = (100, 600, (784,), 32) if network == "mlp" else (10, 100, (3, 32, 32), 50)
    if network == "cnn" and device != "cpu":
        clients, samples = 100, 500
    y = draw.integers(0, 10, clients * samples)
    centres = draw.normal(size=(10, *shape)).astype(np.float32)
    x = centres[y] + draw.normal(size=(len(y), *shape)).astype(np.float32)
    scale = ((0.0,) * shape[0], (1.0,) * shape[0])
    pool = eq.data.Dataset("random", x, y, x[:10], y[:10], tuple("0123456789"), *scale)
    name = "mlp" if network == "mlp" else "climb_cnn"
    fed = eq.federate(
        pool,
        lambda: eq.models.build(name, shape, 10),
        eq.data.IID(clients=clients),
        local=eq.Local(lr=0.05, batch=batch),
    )
    chosen = {"fedavg": eq.FedAvg, "scaffold": eq.Scaffold, "fedshift": eq.FedShift}.get(method)
    chain = eq.Chain(eq.Climb(every=5) if chosen is None else chosen())
    precision = {} if device == "cpu" else {"precision": "bf16" if network == "cnn" else "tf32"}
    engine = eq.Stacked(fed, compile=True, device=device, **precision)
    state = eq.start(fed, chain, engine)
    for line in sys.stdin:
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(int(line)):
            state, _ = eq.one_round(state, fed, chain, engine)
        if device != "cpu":
            torch.cuda.synchronize()
        print(time.perf_counter() - began, flush=True)


class Contestant:
    def __init__(self, tree: Path, job: tuple[str, str], device: str) -> None:
        environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        words = [sys.executable, __file__, "--serve", *job, device]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.rounds = 0
        self.turns: list[float] = []  # seconds of a round

    def timed(self, rounds: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{rounds}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(job: tuple[str, str], trees: dict[str, Path], turns: int, device: str) -> dict[str, Any]:
    contestants = {name: Contestant(tree, job, device) for name, tree in trees.items()}
    for one in contestants.values():
        one.timed(6)  # compiled, and on CUDA recorded
    for one in contestants.values():
        one.rounds = max(5, 5 * round(SECONDS / one.timed(5)))
    rounds = min(one.rounds for one in contestants.values())
    for number in range(turns):
        names = list(contestants)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            contestants[name].turns.append(contestants[name].timed(rounds) / rounds)
    for one in contestants.values():
        one.close()
    medians = {name: statistics.median(one.turns) for name, one in contestants.items()}
    spread = max(*contestants["old"].turns, *contestants["old again"].turns) / min(
        *contestants["old"].turns, *contestants["old again"].turns
    )
    base = statistics.median([*contestants["old"].turns, *contestants["old again"].turns])
    return {
        "rounds_of_a_turn": rounds,
        "seconds": {name: one.turns for name, one in contestants.items()},
        "medians": medians,
        "new_over_old": medians["new"] / base,
        "spread_of_old": spread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    trees = {"old": asked.old, "old again": asked.old, "new": asked.new}
    found = {}
    for name, job in JOBS.items():
        if name.split(",")[0] in {each.split(",")[0] for each in asked.jobs.split(",")}:
            found[name] = measure(job, trees, asked.turns, asked.device)
            ratio, spread = found[name]["new_over_old"], found[name]["spread_of_old"]
            print(f"{name}: new / old {ratio:.3f}, spread of old {spread:.3f}", file=sys.stderr, flush=True)
    document = {
        "command": "python -m benchmarks.versus OLD NEW " + " ".join(sys.argv[3:]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, device {asked.device}",
        "jobs": found,
    }
    text = json.dumps(document, indent=1)
    if asked.out is None:
        print(text)
    else:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()

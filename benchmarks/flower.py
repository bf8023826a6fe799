"""One round with three real sites on this machine: Equipoise over Flower beside Flower's own FedAvg.

    python benchmarks/flower.py [--rounds 5] [--json benchmarks/results/flower-cpu.json]

Both have a SuperLink and three SuperNodes with TLS and node authentication, the same network and samples, and in
each round train and evaluate at every site. Flower's FedAvg has its default settings. The two take turns; the first
round of each is left out, since it loads what later rounds need not load again. Bytes are counted on the loopback
device, so that traffic between processes that would share a machine counts too; between machines, the model goes down
and up once to train, and down once to be evaluated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import equipoise as eq
from equipoise.deploy.transport import certs
from equipoise.deploy.transport.processes import CONNECTION, Child, environment, flower, free_port, listens
from equipoise.deploy.tryout import local, share
from equipoise.runs.config import Config
from equipoise.runs.run import Watch
from equipoise.runs.training import Step

SITES = 3
MODELS = {"2 MB": (600, 720), "45 MB": (3200, 3400)}


def config(hidden: tuple[int, ...], rounds: int) -> Config:
    return Config.from_dict(
        {
            "method": "fedavg",
            "data": {"source": "digits", "options": {"normalise": "none"}, "partition": f"iid(clients={SITES})"},
            "model": {"name": "mlp", "hidden": list(hidden)},
            "local": {"lr": 0.05, "batch": 32},
            "train": {"rounds": rounds, "device": "cpu", "threads": 1},
            "deploy": {"minimum": SITES},
        }
    )


class Clock:
    """Notes, at the end of every round, the time and how many bytes have crossed the loopback device."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def note(self) -> None:
        self.marks.append((time.monotonic(), loopback_bytes()))

    def rounds(self) -> list[dict[str, float]]:
        return [{"seconds": b[0] - a[0], "megabytes": (b[1] - a[1]) / 1e6} for a, b in pairwise(self.marks)]


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def ours(hidden: tuple[int, ...], rounds: int, folder: Path) -> list[dict[str, float]]:
    clock = Clock()

    def step(step: Step) -> None:
        clock.note()

    watch = Watch(step=step, notify=lambda sentence: print(f"  {sentence}"))
    local(config(hidden, rounds), folder / "run", SITES, watch)
    return clock.rounds()


def theirs(hidden: tuple[int, ...], rounds: int, folder: Path) -> list[dict[str, float]]:
    """Flower's own FedAvg, started by the commands of its documentation."""
    parts, times = folder / "parts", folder / "times"
    share(config(hidden, rounds), SITES, parts)
    names = [file.stem for file in sorted(parts.glob("*.npz"))]
    certs.make(folder / "certs", names, ["127.0.0.1"])
    server, address = folder / "certs" / "server", f"127.0.0.1:{free_port()}"
    env = environment(folder / "flower")
    (folder / "flower").mkdir()
    connection = f'[superlink.{CONNECTION}]\naddress = "{address}"\nroot-certificates = "{server}/ca.crt"\n'
    (folder / "flower" / "config.toml").write_text(f'[superlink]\ndefault = "{CONNECTION}"\n{connection}')
    clock = Clock()
    with contextlib.ExitStack() as stack:

        def start(name: str, *words: str) -> Child:
            child = Child(name, words, folder / "none", folder / f"{name}.log", env)
            stack.callback(child.stop)
            return child

        tls = ["--ssl-ca-certfile", f"{server}/ca.crt", "--ssl-certfile", f"{server}/server.crt"]
        tls += ["--ssl-keyfile", f"{server}/server.key", "--enable-supernode-auth"]
        host, port = address.split(":")
        link = start("superlink", "flower-superlink", "--host", host, "--port", port, *tls)
        link.wait_until(lambda: listens(host, int(port)))
        for number, name in enumerate(names):
            key = folder / "certs" / name
            flower(["supernode", "register", f"{key}/key.pub", CONNECTION], env)
            words = ["--root-certificates", f"{key}/ca.crt", "--auth-supernode-private-key", f"{key}/key"]
            words += ["--host", "127.0.0.1", "--port", str(free_port()), "--node-config", f"partition-id={number}"]
            start(name, "flower-supernode", "--superlink", address, *words)
        settings = {"hidden": ",".join(map(str, hidden)), "parts": str(parts), "times": str(times)}
        overrides = " ".join(f'{name}="{value}"' for name, value in settings.items())
        app = Path(__file__).parent / "flower_fedavg"
        flower(["run", str(app), CONNECTION, "-c", f"{overrides} rounds={rounds}"], env)
        # The server app appends one line to `times` before the first round, and one after each round.
        for count in range(1, rounds + 2):
            link.wait_until(lambda count=count: lines(times) >= count, limit=600)
            if count > 1:
                clock.note()
    return clock.rounds()


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--turns", type=int, default=1, help="how often each is run")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {
        "command": f"python benchmarks/flower.py --rounds {given.rounds} --turns {given.turns}",
        "job": f"{SITES} sites on one machine, TLS and keys, digits, one epoch and an evaluation a round",
        "device": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "equipoise": eq.__version__,
        "models": {},
    }
    for name, hidden in MODELS.items():
        taken: dict[str, list[dict[str, float]]] = {"equipoise": [], "flower's FedAvg": []}
        for _ in range(given.turns):
            for who, job in (("equipoise", ours), ("flower's FedAvg", theirs)):
                print(f"{name}, {who} ...", flush=True)
                with tempfile.TemporaryDirectory(prefix="equipoise-") as folder:
                    taken[who] += job(hidden, given.rounds + 1, Path(folder))
        entry: dict[str, Any] = {
            who: {key: statistics.median(one[key] for one in rounds) for key in ("seconds", "megabytes")}
            | {"all_seconds": [round(one["seconds"], 2) for one in rounds]}
            for who, rounds in taken.items()
        }
        entry["times_as_long"] = entry["equipoise"]["seconds"] / entry["flower's FedAvg"]["seconds"]
        result["models"][name] = entry
        for who in taken:
            print(f"{name:6} {who:16} {entry[who]['seconds']:6.1f} s and {entry[who]['megabytes']:7.1f} MB a round")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""A try-out on one machine: the server and all sites, each a process of its own, as they would be on several."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from equipoise import runs
from equipoise.config import Config
from equipoise.deploy import certs
from equipoise.deploy.link import Door
from equipoise.deploy.processes import Child, free_port
from equipoise.deploy.serve import serve
from equipoise.errors import ConfigError
from equipoise.experiment import Record
from equipoise.runs import Watch

LAST = 30.0  # seconds that sites have to put the final model away
MISTAKE = 2  # the exit code of a site that nothing but its user can help


def local(config: Config, out: Path, sites: int, watch: Watch = Watch()) -> Record:
    """Divide the data of a config among sites, and carry it out with them over TLS on this machine."""
    with tempfile.TemporaryDirectory(prefix="equipoise-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        names = [file.stem for file in share(config, sites, folder)]
        certs.make(folder / "certs", names, ["127.0.0.1"])
        door = Door("127.0.0.1", free_port(), folder / "certs" / "server")
        joined = []
        for name in names:
            child = Child(name, _words(name, door, folder, out), folder, out / "logs" / f"{name}.log", _env(sites))
            stack.callback(child.stop)
            joined.append(child)
        config = config.model_copy(update={"deploy": config.deploy.model_copy(update={"sites": names})})
        result = serve(config, out, door, watch, lambda: _mistaken(joined))
        until = time.monotonic() + LAST
        while any(child.code is None for child in joined) and time.monotonic() < until:
            time.sleep(0.1)
        return result


def share(config: Config, sites: int, folder: Path) -> list[Path]:
    """Divide the data of a config among so many sites, one .npz file for each."""
    fed = runs.federate(divided(config, sites))
    if fed.clients != sites:
        raise ConfigError(f"--sites {sites}: the data come with {fed.clients} owners; expected --sites {fed.clients}")
    if len(fed.eligible) < sites:
        raise ConfigError(f"--sites {sites}: {sites - len(fed.eligible)} of them would have no sample")
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"site_{number:0{len(str(sites))}d}.npz" for number in range(1, sites + 1)]
    for number, file in enumerate(files):
        mine = fed.indices[int(fed.offsets[number]) : int(fed.offsets[number + 1])]
        np.savez(file, x=fed.x[mine].numpy(), y=fed.y[mine].numpy(), classes=np.array(fed.classes))
    return files


def divided(config: Config, sites: int) -> Config:
    """The config with its data divided among so many; data that come with owners stay with them."""
    partition: Any = config.data.partition
    if getattr(partition, "clients", None) is not None:
        partition = replace(partition, clients=sites)
    if config.train.cohort is not None and isinstance(config.train.cohort, int) and config.train.cohort > sites:
        raise ConfigError(f"train.cohort = {config.train.cohort}: expected at most {sites}, the number of sites")
    data = config.data.model_copy(update={"partition": partition})
    return config.model_copy(update={"data": data})


def _words(name: str, door: Door, folder: Path, out: Path) -> list[str]:
    words = [sys.executable, "-m", "equipoise.cli", "join", "--server", door.address, "--name", name]
    words += ["--data", str(folder / f"{name}.npz"), "--certs", str(folder / "certs" / name)]
    return [*words, "--out", str(out.absolute() / "sites" / name)]


def _env(sites: int) -> dict[str, str]:
    """The cores are shared among the sites, unless the user has said otherwise."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // sites)), **os.environ}


def _mistaken(joined: Sequence[Child]) -> str | None:
    for child in joined:
        if child.code == MISTAKE:
            return f"{child.name} could not take part ({child.said().strip().splitlines()[-1]})"
    return None

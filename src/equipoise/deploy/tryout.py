"""A try-out on one machine: the server and every site are separate processes, as on several machines."""

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

from equipoise.core.errors import ConfigError
from equipoise.deploy.packets import check_model, read_chain
from equipoise.deploy.serve import serve
from equipoise.deploy.transport import certs
from equipoise.deploy.transport.link import Door
from equipoise.deploy.transport.processes import Child, free_port
from equipoise.methods.registry import parse
from equipoise.runs.config import Config
from equipoise.runs.federate import federate
from equipoise.runs.run import Watch
from equipoise.runs.training import Record

SAVE_SECONDS = 30.0  # how long the sites have, after the run, to save the final model
USER_ERROR = 2  # the exit code of `equipoise join` after a mistake that only the user can correct


def local(
    config: Config,
    out: Path,
    sites: int,
    watch: Watch = Watch(),
    *,
    models: Sequence[str] = (),
    methods: Sequence[str] = (),
) -> Record:
    """Divide the data of a config among sites, and train with these sites over TLS on this machine.

    `models` and `methods` are the names of code outside Equipoise that the sites allow.
    """
    # A site would refuse the code only after all processes have started. The chain is checked under the names that
    # the server sends, which may differ from those in the config: a class has one module, but several may import it.
    check_model(config.model.name, models)
    read_chain(str(parse(config.method)), methods)
    allowed = [word for name in models for word in ("--allow-model", name)]
    allowed += [word for name in methods for word in ("--allow-method", name)]
    with tempfile.TemporaryDirectory(prefix="equipoise-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        names = [file.stem for file in share(config, sites, folder)]
        certs.make(folder / "certs", names, ["127.0.0.1"])
        door = Door("127.0.0.1", free_port(), folder / "certs" / "server")
        joined = []
        for name in names:
            words = [*_join_words(name, door, folder, out), *allowed]
            child = Child(name, words, folder, out / "logs" / f"{name}.log", _env(sites))
            stack.callback(child.stop)
            joined.append(child)
        config = config.model_copy(update={"deploy": config.deploy.model_copy(update={"sites": names})})
        result = serve(config, out, door, watch, lambda: _failed_site(joined))
        until = time.monotonic() + SAVE_SECONDS
        while any(child.code is None for child in joined) and time.monotonic() < until:
            time.sleep(0.1)
        return result


def share(config: Config, sites: int, folder: Path) -> list[Path]:
    """Divide the data of a config among `sites` sites, and write one .npz file for each of them."""
    fed = federate(divided(config, sites))
    if fed.clients != sites:
        raise ConfigError(f"--sites {sites}: the data have {fed.clients} owners; expected --sites {fed.clients}")
    if len(fed.eligible) < sites:
        raise ConfigError(f"--sites {sites}: {sites - len(fed.eligible)} of the sites would have no sample")
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"site_{number:0{len(str(sites))}d}.npz" for number in range(1, sites + 1)]
    for number, file in enumerate(files):
        mine = fed.indices[int(fed.offsets[number]) : int(fed.offsets[number + 1])]
        np.savez(file, x=fed.x[mine].numpy(), y=fed.y[mine].numpy(), classes=np.array(fed.classes))
    return files


def divided(config: Config, sites: int) -> Config:
    """The config with a partition among `sites` clients; data that have owners stay with their owners. What a site
    holds out is decided at the site, by deploy.held_out."""
    partition: Any = config.data.partition
    if getattr(partition, "clients", None) is not None:
        partition = replace(partition, clients=sites)
    if config.train.cohort is not None and isinstance(config.train.cohort, int) and config.train.cohort > sites:
        raise ConfigError(f"train.cohort = {config.train.cohort}: expected at most {sites}, the number of sites")
    data = config.data.model_copy(update={"partition": partition, "local_test": 0.0})
    return config.model_copy(update={"data": data})


def _join_words(name: str, door: Door, folder: Path, out: Path) -> list[str]:
    words = [sys.executable, "-m", "equipoise.cli", "join", "--server", door.address, "--name", name]
    words += ["--data", str(folder / f"{name}.npz"), "--certs", str(folder / "certs" / name)]
    return [*words, "--out", str(out.absolute() / "sites" / name)]


def _env(sites: int) -> dict[str, str]:
    """The environment of a site: every site gets an equal share of the cores, unless the user has set a number."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // sites)), **os.environ}


def _failed_site(joined: Sequence[Child]) -> str | None:
    """Why the first site that ended with a user's mistake did so; None while there is no such site."""
    for child in joined:
        if child.code == USER_ERROR:
            return f"{child.name} could not take part ({child.output().strip().splitlines()[-1]})"
    return None

"""The server of a run with real sites: it waits for them, agrees on classes and scale with them, and trains."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise import __version__, models
from equipoise.core.errors import ConfigError, DataError, TrainingError
from equipoise.core.federation import Federation, Split
from equipoise.core.local import Local
from equipoise.core.network import initialised
from equipoise.core.questions import ClassCounts
from equipoise.data import minority as rare_classes
from equipoise.data.dataset import normalisation
from equipoise.data.samples import in_order, read_samples
from equipoise.deploy.agreement import Agreement
from equipoise.deploy.flower import Flower, Patience
from equipoise.deploy.roll import Roll
from equipoise.deploy.transport.carrier import Carrier
from equipoise.methods.registry import parse
from equipoise.runs import run
from equipoise.runs.config import SITES, Config
from equipoise.runs.federate import label
from equipoise.runs.folder import RunFolder
from equipoise.runs.run import Watch
from equipoise.runs.training import Record

SITE_OPTIONS = ("label", "drop", "delimiter")  # the keys of data.options that say how a site reads its file


def check(config: Config) -> None:
    """Refuse a config that real sites cannot train, before anything is started."""
    parse(config.method)
    train = config.train
    if train.precision not in ("auto", "float32", "float64"):
        raise ConfigError(f"train.precision = {train.precision!r}: with real sites, expected float32 or float64")
    if config.data.source == SITES and config.data.local_test:
        raise ConfigError(
            f"data.local_test = {config.data.local_test}: a real site holds out the share deploy.held_out; expected 0"
        )
    if train.patience is not None and not config.deploy.held_out:
        raise ConfigError(f"train.patience = {train.patience}: expected deploy.held_out above 0")


def train(
    config: Config,
    folder: RunFolder,
    carrier: Carrier,
    names: Mapping[int, str] | None,
    watch: Watch = Watch(),
    roster: tuple[str, ...] | None = None,
) -> Record:
    """Train the run of a folder, from its start or from its last checkpoint.

    `names` has the name of each node as its key proves it. `roster` has the names of the expected sites, where the
    config does not list them.
    """
    roster = tuple(sorted(config.deploy.sites or roster or ()))
    if not roster:
        raise ConfigError("deploy.sites: no site is named; expected a list such as ['site_a', 'site_b']")
    roll = Roll(roster, names, say=watch.notify)
    saved = folder.read("agreement")
    agreement = None if saved is None else Agreement.from_dict(saved)
    roll.hello = {"data_options": _options(config), "ask_classes": config.deploy.classes is None}
    _wait_for_sites(roll, carrier, config.deploy.wait, watch)
    make = _engines(config, carrier, roll, watch)
    if agreement is None:
        agreement = _agree(config, roll, make)
        folder.write("agreement", agreement.to_dict())
    engine = make(agreement)
    counts = engine.ask(ClassCounts(len(agreement.classes)), {}, {})["counts"]
    fed = _with_counts(config, engine.fed, counts)
    engine.fed = fed
    described = run.describe(fed) | {"sites": list(roster), "sizes": None}
    folder.write("federation", described)
    folder.write("plan", {"engine": "flower", "precision": agreement.precision, "equipoise": __version__})
    run.warn(fed, watch)
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    # A round takes seconds here and a checkpoint much less, so every round gets a checkpoint.
    often = config.train.model_copy(update={"checkpoint_every": 1, "checkpoint_seconds": 0.0})
    return run.train_in_folder(config.model_copy(update={"train": often}), fed, engine, folder, watch)


def _wait_for_sites(roll: Roll, carrier: Carrier, wait: float, watch: Watch) -> None:
    """Wait until all sites have joined: the requests before the first round go to every site."""
    until = time.monotonic() + wait
    watch.notify(f"waiting for {', '.join(roll.roster)}")
    while len(there := roll.call(carrier)) < len(roll.roster):
        if time.monotonic() > until:
            missing = [name for number, name in enumerate(roll.roster) if number not in there]
            raise TrainingError(
                f"{len(there)} of {len(roll.roster)} sites have joined within deploy.wait = {wait:g} seconds;"
                f" {', '.join(missing)} did not"
            )
        time.sleep(0.5)


def _agree(config: Config, roll: Roll, make: Callable[[Agreement], Flower]) -> Agreement:
    first, *others = sorted(roll.hellos)
    hello = roll.hellos[first]
    for other in others:
        _check_alike(first, hello, other, roll.hellos[other])
    classes = in_order({str(name) for hello in roll.hellos.values() for name in hello.get("classes", ())})
    if config.deploy.classes is not None:
        classes = tuple(config.deploy.classes)
    if len(classes) < 2:
        raise DataError(f"the sites have {len(classes)} classes in all ({', '.join(classes)}), expected at least 2")
    channels = hello["shape"][0]
    agreement = Agreement(
        run=uuid.uuid4().hex[:12],
        roster=roll.roster,
        classes=classes,
        shape=tuple(hello["shape"]),
        dtype=hello["dtype"],
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        columns=tuple(hello["columns"]),
        model=config.model.name,
        method=str(parse(config.method)),
        precision="float32" if config.train.precision == "auto" else config.train.precision,
        seed=config.train.seed,
        held_out=config.deploy.held_out,
        model_options=config.model.options,
        data_options=_options(config),
    )
    choice = str(config.data.options.get("normalise", "pool"))
    if choice != "pool":
        mean, std = normalisation(choice, np.zeros((1, *agreement.shape), agreement.dtype))
        return replace(agreement, mean=mean, std=std)
    mean = make(agreement).moments(None)
    variance = make(agreement).moments(mean)
    # A feature with the same value everywhere is only centred, so that it becomes zero.
    std = tuple(s if (s := math.sqrt(v)) > 1e-9 * abs(m) else 1.0 for m, v in zip(mean, variance, strict=True))
    return replace(agreement, mean=mean, std=std)


def _check_alike(first: str, a: dict[str, Any], other: str, b: dict[str, Any]) -> None:
    for name in sorted(set(a["columns"]) ^ set(b["columns"])):
        have, lack = (first, other) if name in a["columns"] else (other, first)
        raise DataError(
            f"{have} has a column {name!r} that {lack} does not have; leave it out with data.options.drop"
        )
    for key, what in {"version": "Equipoise", "shape": "samples of shape", "dtype": "samples of type"}.items():
        if a[key] != b[key]:
            raise DataError(
                f"{first} has {what} {a[key]}, but {other} has {what} {b[key]}; expected the same at every site"
            )


def _engines(config: Config, carrier: Carrier, roll: Roll, watch: Watch) -> Callable[[Agreement], Flower]:
    deploy = config.deploy
    patience = Patience(deploy.deadline, deploy.wait, deploy.minimum, deploy.message_mib << 20)

    def make(agreement: Agreement) -> Flower:
        return Flower(_federation(config, agreement), agreement, carrier, roll, patience=patience, say=watch.notify)

    return make


def _federation(config: Config, agreement: Agreement) -> Federation:
    """The federation as the server sees it, without any sample of the sites."""
    sites = len(agreement.roster)
    cohort = config.train.cohort
    if isinstance(cohort, float):
        cohort = max(1, round(cohort * sites))
    if cohort is not None and cohort > sites:
        raise ConfigError(f"train.cohort = {cohort}: expected 1 to {sites}, the number of sites")
    blank = agreement.federation(np.zeros((0, *agreement.shape), agreement.dtype), np.zeros(0, np.int64), 0)
    return replace(
        blank,
        network=initialised(
            lambda: models.build(agreement.model, agreement.shape, len(agreement.classes), **agreement.model_options),
            agreement.seed,
        ),
        offsets=torch.arange(sites + 1),  # as if every site had one sample: a site does not reveal its number
        local=Local(**config.local.build(config.train.rounds)),
        cohort=cohort or 0,
        auxiliary=_split(config.deploy.auxiliary, agreement),
        test=_split(config.deploy.test, agreement),
    )


def _split(path: str | None, agreement: Agreement) -> Split | None:
    """The samples in a file at the server."""
    if path is None:
        return None
    samples = read_samples(Path(path), **agreement.data_options, columns=agreement.columns or None)
    if samples.labels is None or samples.x.shape[1:] != agreement.shape:
        raise DataError(f"{path}: samples of shape {list(samples.x.shape[1:])}, expected {list(agreement.shape)}")
    return Split(torch.from_numpy(samples.x), torch.from_numpy(agreement.encode(samples.labels)))


def _with_counts(config: Config, fed: Federation, counts: torch.Tensor) -> Federation:
    named = config.data.minority
    rare = rare_classes(counts.tolist()) if named is None else [label(name, fed.classes) for name in named]
    return replace(fed, counts=counts, minority=tuple(rare))


def _options(config: Config) -> dict[str, Any]:
    return {name: value for name, value in config.data.options.items() if name in SITE_OPTIONS}

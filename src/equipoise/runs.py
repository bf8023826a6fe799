"""Runs: a config carried out in a run folder, from which it can be resumed at any moment."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from equipoise import __version__, data, expression, models, predict, tree
from equipoise.baselines import CENTRALISED, LOCAL, alone, centralised
from equipoise.config import SITES, Config
from equipoise.data.files import data_root
from equipoise.engines import Engine, Serial, Stacked, pace
from equipoise.engines.together import Seat
from equipoise.errors import CheckpointError, ConfigError, nearest
from equipoise.evaluation import across_clients
from equipoise.experiment import Record, Settings, Snapshot, Step, Training
from equipoise.federation import Federation, build
from equipoise.folder import RunFolder
from equipoise.local import Local
from equipoise.method import Chain
from equipoise.methods import METHODS

FULL_RECORDS = 20  # with more classes, only the last record carries the confusion matrix


@dataclass(frozen=True)
class Watch:
    """Whoever wants to see a run as it goes: told once what it is, then of every round."""

    begin: Callable[[Config, Federation, int], None] = lambda config, fed, done: None
    step: Callable[[Step], None] = lambda step: None
    say: Callable[[str], None] = lambda sentence: None
    stop: Callable[[], bool] = lambda: False  # asked after every round: shall the run stop here, to be resumed later?


class Stopped(Exception):
    """A run that its watch has stopped, with a checkpoint of the round it had come to."""


def parse_method(text: str) -> Chain:
    return Chain(*expression.parse(text, METHODS))


def federate(config: Config) -> Federation:
    """Load the data, make it imbalanced, divide it, and build the model."""
    table = config.data
    pool = _pool(table.source, table.dir, json.dumps(table.options, sort_keys=True))
    classes = len(pool.classes)
    fed = build(
        pool,
        lambda: models.build(config.model.name, pool.x.shape[1:], classes, **config.model.options),
        table.partition,
        imbalance=table.imbalance,
        local=Local(**config.local.build(config.train.rounds)),
        cohort=config.train.cohort,
        seed=config.train.seed,
        validation=table.validation,
        auxiliary=table.auxiliary,
        kind=models.kind(config.model.name, pool.x.shape[1:], classes, **config.model.options),
        minority=None if table.minority is None else tuple(label(name, pool.classes) for name in table.minority),
    )
    return centralised(fed) if config.method == CENTRALISED else fed


def _pool(source: str, folder: str | None, options: str) -> data.Dataset:
    """A known data set is read once for many runs; a file of the user's own may change between them."""
    if source == SITES:
        raise ConfigError(
            "data.source = 'sites': the data are with the sites, which join `equipoise serve`; expected a data set or"
            " a file to simulate with"
        )
    if source not in data.SOURCES:
        return data.load(source, folder, **json.loads(options))
    return _known(source, str(data_root(folder).absolute()), options)


@lru_cache(maxsize=2)
def _known(source: str, folder: str, options: str) -> data.Dataset:
    return data.load(source, folder, **json.loads(options))


def label(name: int | str, classes: tuple[str, ...]) -> int:
    if isinstance(name, int) and 0 <= name < len(classes):
        return name
    if str(name) in classes:
        return classes.index(str(name))
    raise ConfigError(f"data.minority: there is no class {name!r}; {nearest(name, classes)}")


def device_of(config: Config) -> str:
    device = config.train.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.device = {device!r}: torch finds no CUDA device here; expected cpu or auto")
    return device


def execution_plan(config: Config, fed: Federation, seat: Seat | None = None) -> dict[str, Any]:
    """How a run is carried out: what must be the same for a resumed run to end in the same bits."""
    train, device = config.train, device_of(config)
    threads = train.threads or torch.get_num_threads()
    return {
        "engine": train.engine,
        "device": device,
        "precision": _precision(train.precision, device),
        "compile_from": _compile_from(config, fed, device, threads),
        "threads": threads,
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
        "block": train.block,
        "together": 1 if seat is None else seat.runs,
    }


def _compile_from(config: Config, fed: Federation, device: str, threads: int) -> int | None:
    """The round from which on a run is compiled."""
    train = config.train
    if train.compile != "auto":
        return 0 if train.compile else None
    if train.engine != "stacked" or config.method == LOCAL:
        return None
    chain = Chain() if config.method == CENTRALISED else parse_method(config.method)
    return pace.compile_from(fed, chain.local(fed.local), train.rounds, device, threads)


def _precision(asked: str, device: str) -> str:
    if asked != "auto":
        return asked
    return "tf32" if device.startswith("cuda") else "float32"


def _prepare_torch(plan: dict[str, Any]) -> None:
    torch.set_num_threads(plan["threads"])
    if plan["device"].startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with this
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a kernel for each tensor
        fast = plan["precision"] in ("tf32", "bf16")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = fast


def make_engine(plan: dict[str, Any], fed: Federation, memory_gib: float, seat: Seat | None = None) -> Engine:
    options = {"device": plan["device"], "precision": plan["precision"], "memory_gib": memory_gib}
    if plan["engine"] == "serial":
        return Serial(fed, **options)
    return Stacked(fed, width=plan.get("block"), compile_from=plan["compile_from"], seat=seat, **options)


def run(config: Config, out: Path, watch: Watch = Watch(), seat: Seat | None = None) -> Record:
    """Carry out a config in a new folder; gives the content of its result.json. `seat`: among runs at once."""
    if config.method not in (CENTRALISED, LOCAL):
        parse_method(config.method)
    fed = federate(config)
    plan = execution_plan(config, fed, seat)
    warn(fed, watch)
    with RunFolder.create(out, config.to_dict()) as folder:
        folder.write("federation", describe(fed))
        folder.write("plan", plan | {"equipoise": __version__})
        return carry_out(config, fed, _ready(plan, config, fed, seat), folder, watch)


def resume(path: Path, watch: Watch = Watch(), seat: Seat | None = None) -> Record:
    """Go on with a run that was cut off; one that is finished gives its result again."""
    with RunFolder.open(path) as folder:
        result = folder.read("result")
        if result is not None:
            watch.say(f"{path} is finished already")
            return result
        config = Config.from_dict(folder.config)
        fed = federate(config)
        now = execution_plan(config, fed, seat)
        plan = {"together": 1} | (folder.read("plan") or now)
        looked_at = ("torch", "machine", "together")
        changed = [f"{key} {plan[key]} is now {now[key]}" for key in looked_at if plan[key] != now[key]]
        folder.write("federation", describe(fed))
        folder.write("plan", plan | {"together": now["together"]})
        if changed:
            watch.say(f"{'; '.join(changed)}: the result agrees with the uncut run to tolerance, not bit by bit")
        return carry_out(config, fed, _ready(plan, config, fed, seat), folder, watch)


def _ready(plan: dict[str, Any], config: Config, fed: Federation, seat: Seat | None) -> Engine:
    _prepare_torch(plan)
    return make_engine(plan, fed, config.train.memory_gib, seat)


def carry_out(config: Config, fed: Federation, engine: Engine, folder: RunFolder, watch: Watch) -> Record:
    """Train from the last checkpoint of the folder, or from the start, to the result."""
    began, train = time.monotonic(), config.train
    if config.method == LOCAL:
        watch.begin(config, fed, 0)
        folder.rewind(-1)
        mean_site = alone(fed, engine, train.rounds)
        folder.append(mean_site)
        return _finish(folder, {"method": LOCAL, "last": mean_site, "best": None}, began)
    saved = folder.load()
    snapshot = None
    if saved is not None:
        trees, meta = saved
        if "recovered_from" in meta:
            watch.say(meta["recovered_from"])
        snapshot = Snapshot.of(trees, meta["round"], meta["notes"])
    folder.rewind(-1 if snapshot is None else snapshot.state.round)
    chain = Chain() if config.method == CENTRALISED else parse_method(config.method)
    settings = Settings(train.rounds, train.evaluate_every, train.select, train.patience, train.target)
    training = Training(fed, chain, engine, settings, snapshot)
    watch.begin(config, fed, training.state.round)
    record, written = _last(folder), time.monotonic()
    for step in training:
        if step.record is not None:
            record = step.record
            few = len(fed.classes) <= FULL_RECORDS or step.last
            folder.append(record if few else {k: v for k, v in record.items() if k != "confusion"})
        due = step.round % train.checkpoint_every == 0 and time.monotonic() - written >= train.checkpoint_seconds
        stop = not step.last and watch.stop()
        if due or step.last or stop:
            _save(folder, step.snapshot())
            written = time.monotonic()
        watch.step(step)
        if stop:
            raise Stopped(f"{folder.path} stopped after round {step.round}")
    if record is None:
        raise CheckpointError(f"{folder.path}: the run ended without a single record")
    _export(config, fed, folder.path, training)
    notes = training.notes
    result = {"method": str(config.method), "last": record, "best": notes["best"], "reached": notes["reached"]}
    if not engine.holds_out:  # a server of real sites sees sums, and no spread
        result["across_clients"] = across_clients(engine, training.state.params, training.state.buffers)
    engine.deliver(training.state.params, training.state.buffers)
    return _finish(folder, result, began)


def warn(fed: Federation, watch: Watch) -> None:
    """What is odd about the data but no reason to stop."""
    absent = [name for name, count in zip(fed.classes, fed.class_counts.tolist(), strict=True) if count == 0]
    if absent:
        watch.say(f"no client has a sample of class {', '.join(absent)}")
    if empty := fed.clients - len(fed.eligible):
        watch.say(f"{empty} of {fed.clients} clients got no samples from the partition and are skipped")


def _last(folder: RunFolder) -> Record | None:
    records = folder.records()
    return records[-1] if records else None


def _save(folder: RunFolder, snapshot: Snapshot) -> None:
    folder.save(snapshot.trees(), {"round": snapshot.state.round, "notes": snapshot.notes})


def _finish(folder: RunFolder, result: Record, began: float) -> Record:
    result = result | {"seconds": time.monotonic() - began}
    folder.write("result", result)
    return result


def _export(config: Config, fed: Federation, folder: Path, training: Training) -> None:
    """The models of the last round and of the best, as other programs read them, and `predict`."""
    models = {"model": {**training.state.params, **training.state.buffers}}
    if training.best:
        models["best"] = {**training.best["params"], **training.best["buffers"]}
    card = predict.Card(
        name=config.model.name,
        classes=fed.classes,
        shape=tuple(fed.x.shape[1:]),
        dtype=str(fed.x.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        mean=fed.mean,
        std=fed.std,
        precision=training.engine.precision,  # type: ignore[arg-type]
        options=config.model.options,
        features=fed.columns,
        label=_option(config, "label"),
        delimiter=_option(config, "delimiter") or ",",
    )
    predict.save(folder, card, models)


def _option(config: Config, name: str) -> str | None:
    """Of a table's file."""
    value = config.data.options.get(name)
    return value if isinstance(value, str) else None


def describe(fed: Federation) -> dict[str, Any]:
    sizes = fed.offsets.diff().double()
    return {
        "classes": list(fed.classes),
        "minority": list(fed.minority),
        "train_counts": fed.class_counts.tolist(),
        "clients": fed.clients,
        "empty_clients": fed.clients - len(fed.eligible),
        "sizes": {"least": int(sizes.min()), "mean": float(sizes.mean()), "most": int(sizes.max())},
        "parameters": tree.count(fed.network.params),
        "test": 0 if fed.test is None else len(fed.test),
        "validation": 0 if fed.validation is None else len(fed.validation),
    }

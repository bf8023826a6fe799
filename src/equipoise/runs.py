"""Runs: a config carried out in a run folder, from which it can be resumed at any moment."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from equipoise import __version__, data, expression, models, tree
from equipoise.baselines import CENTRALISED, LOCAL, alone, centralised
from equipoise.config import Config
from equipoise.engines import Engine, Serial, Stacked
from equipoise.errors import CheckpointError, ConfigError, nearest
from equipoise.evaluation import across_clients
from equipoise.experiment import Record, Settings, Snapshot, Step, Training
from equipoise.federation import Federation, build
from equipoise.folder import RunFolder
from equipoise.local import Local
from equipoise.method import Chain
from equipoise.methods import METHODS
from equipoise.tree import Tree

FULL_RECORDS = 20  # with more classes, only the last record carries the confusion matrix


@dataclass(frozen=True)
class Watch:
    """Whoever wants to see a run as it goes: told once what it is, then of every round."""

    begin: Callable[[Config, Federation, int], None] = lambda config, fed, done: None
    step: Callable[[Step], None] = lambda step: None
    say: Callable[[str], None] = lambda sentence: None


def parse_method(text: str) -> Chain:
    return Chain(*expression.parse(text, METHODS))


def federate(config: Config) -> Federation:
    """Load the data, make it imbalanced, divide it, and build the model."""
    table = config.data
    pool = data.load(table.source, table.dir, **table.options)
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
        minority=None if table.minority is None else tuple(_label(name, pool.classes) for name in table.minority),
    )
    return centralised(fed) if config.method == CENTRALISED else fed


def _label(name: int | str, classes: tuple[str, ...]) -> int:
    if isinstance(name, int) and 0 <= name < len(classes):
        return name
    if str(name) in classes:
        return classes.index(str(name))
    raise ConfigError(f"data.minority: there is no class {name!r}; {nearest(name, classes)}")


def execution_plan(config: Config, fed: Federation) -> dict[str, Any]:
    """How a run is carried out: what must be the same for a resumed run to end in the same bits."""
    train = config.train
    device = train.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.device = {device!r}: torch finds no CUDA device here; expected cpu or auto")
    plan = {
        "engine": train.engine,
        "device": device,
        "precision": train.precision,
        "compile": train.compile,
        "threads": train.threads or torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
    }
    _prepare_torch(plan)
    return plan | {"block": train.block or make_engine(plan, fed, train.memory_gib).width}


def _prepare_torch(plan: dict[str, Any]) -> None:
    torch.set_num_threads(plan["threads"])
    if plan["device"].startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with this
        torch.use_deterministic_algorithms(True)
        fast = plan["precision"] in ("tf32", "bf16")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = fast


def make_engine(plan: dict[str, Any], fed: Federation, memory_gib: float) -> Engine:
    options = {"device": plan["device"], "precision": plan["precision"], "memory_gib": memory_gib}
    if plan["engine"] == "serial":
        return Serial(fed, **options)
    return Stacked(fed, width=plan.get("block"), compile=plan["compile"], **options)


def run(config: Config, out: Path, watch: Watch = Watch()) -> Record:
    """Carry out a config in a new folder; gives the content of its result.json."""
    if config.method not in (CENTRALISED, LOCAL):
        parse_method(config.method)
    fed = federate(config)
    plan = execution_plan(config, fed)
    _warn(fed, watch)
    with RunFolder.create(out, config.to_dict()) as folder:
        folder.write("federation", _describe(fed))
        folder.write("plan", plan | {"equipoise": __version__})
        return _carry_out(config, fed, plan, folder, watch)


def resume(path: Path, watch: Watch = Watch()) -> Record:
    """Go on with a run that was cut off; one that is finished gives its result again."""
    with RunFolder.open(path) as folder:
        result = folder.read("result")
        if result is not None:
            watch.say(f"{path} is finished already")
            return result
        config = Config.from_dict(folder.config)
        fed = federate(config)
        plan = folder.read("plan") or execution_plan(config, fed)
        folder.write("federation", _describe(fed))
        folder.write("plan", plan)
        now = execution_plan(config, fed)
        changed = [f"{key} {plan[key]} is now {now[key]}" for key in ("torch", "machine") if plan[key] != now[key]]
        if changed:
            watch.say(f"{'; '.join(changed)}: the result agrees with the uncut run to tolerance, not bit by bit")
        return _carry_out(config, fed, plan, folder, watch)


def _carry_out(config: Config, fed: Federation, plan: dict[str, Any], folder: RunFolder, watch: Watch) -> Record:
    _prepare_torch(plan)
    began, train = time.monotonic(), config.train
    engine = make_engine(plan, fed, train.memory_gib)
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
        if due or step.last:
            _save(folder, step.snapshot())
            written = time.monotonic()
        watch.step(step)
    if record is None:
        raise CheckpointError(f"{folder.path}: the run ended without a single record")
    _export(folder.path / "model.safetensors", {**training.state.params, **training.state.buffers})
    if training.best:
        _export(folder.path / "best.safetensors", {**training.best["params"], **training.best["buffers"]})
    spread = across_clients(engine, training.state.params, training.state.buffers)
    notes = training.notes
    result = {"method": str(config.method), "last": record, "best": notes["best"], "reached": notes["reached"]}
    return _finish(folder, result | {"across_clients": spread}, began)


def _warn(fed: Federation, watch: Watch) -> None:
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


def _export(path: Path, values: Tree) -> None:
    """The model as other programs read it, put in place whole."""
    partial = path.with_suffix(".partial")
    save_file({name: leaf.detach().cpu().contiguous() for name, leaf in tree.flatten(values).items()}, partial)
    partial.replace(path)


def _describe(fed: Federation) -> dict[str, Any]:
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

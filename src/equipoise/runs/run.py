"""A run: a config trained in a run folder. A run that was cut off at any moment can be resumed from its folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise import __version__
from equipoise.core import tree
from equipoise.core.engine import Engine, Seat
from equipoise.core.errors import CheckpointError
from equipoise.core.federation import Federation
from equipoise.engines import Simulator
from equipoise.methods.registry import parse
from equipoise.runs import predict
from equipoise.runs.baselines import CENTRALISED, LOCAL, train_alone
from equipoise.runs.config import Config
from equipoise.runs.evaluation import across_clients
from equipoise.runs.execution import chain_of, execution_plan, make_engine, prepare_torch
from equipoise.runs.federate import federate
from equipoise.runs.folder import RunFolder
from equipoise.runs.training import Record, Settings, Snapshot, Step, Training

FULL_RECORDS = 20  # with more classes than this, only the last record keeps its confusion matrix


@dataclass(frozen=True)
class Watch:
    """Callbacks with which a caller follows a run."""

    # Called once, before training. The int is the number of rounds that a resumed run has behind it, else 0.
    begin: Callable[[Config, Federation, int], None] = lambda config, fed, done: None
    step: Callable[[Step], None] = lambda step: None  # called after every round
    notify: Callable[[str], None] = lambda sentence: None  # called with a message for the user
    stop: Callable[[], bool] = lambda: False  # called after every round; True stops the run, to be resumed later


class Stopped(Exception):
    """A run stopped because `Watch.stop` said so; its last round is in a checkpoint."""


def run(config: Config, out: Path, watch: Watch = Watch(), seat: Seat | None = None) -> Record:
    """Train a config in a new folder and return the content of its result.json.

    `seat` is the run's place among several runs that train at the same time.
    """
    if config.method not in (CENTRALISED, LOCAL):
        parse(config.method)
    fed = federate(config)
    plan = execution_plan(config, fed, seat)
    warn(fed, watch)
    with RunFolder.create(out, config.to_dict()) as folder:
        folder.write("federation", describe(fed))
        folder.write("plan", plan | {"equipoise": __version__})
        return train_in_folder(config, fed, _ready(plan, config, fed, seat), folder, watch)


def resume(path: Path, watch: Watch = Watch(), seat: Seat | None = None) -> Record:
    """Continue a run that was cut off; for a finished run, return its result."""
    with RunFolder.open(path) as folder:
        result = folder.read("result")
        if result is not None:
            watch.notify(f"{path} is finished already")
            return result
        config = Config.from_dict(folder.config)
        fed = federate(config)
        now = execution_plan(config, fed, seat)
        plan = {"together": 1, "fast": True} | (folder.read("plan") or now)
        decide_bits = ("torch", "machine", "together", "fast")
        changed = [f"{key} {plan[key]} is now {now[key]}" for key in decide_bits if plan[key] != now[key]]
        folder.write("federation", describe(fed))
        folder.write("plan", plan | {"together": now["together"]})
        if changed:
            watch.notify(
                f"{'; '.join(changed)}: the result equals that of an uninterrupted run up to rounding, not bit by bit"
            )
        return train_in_folder(config, fed, _ready(plan, config, fed, seat), folder, watch)


def _ready(plan: dict[str, Any], config: Config, fed: Federation, seat: Seat | None) -> Simulator:
    prepare_torch(plan)
    return make_engine(plan, fed, config.train.memory_gib, seat)


def train_in_folder(config: Config, fed: Federation, engine: Engine, folder: RunFolder, watch: Watch) -> Record:
    """Train from the folder's last checkpoint, or from the start if it has none, and write the result."""
    began, train = time.monotonic(), config.train
    if config.method == LOCAL:
        assert isinstance(engine, Simulator), "the baseline `local` runs only in a simulation"
        watch.begin(config, fed, 0)
        folder.rewind(-1)
        mean_client = train_alone(fed, engine, train.rounds)
        folder.append(mean_client)
        return _finish(folder, {"method": LOCAL, "last": mean_client, "best": None}, began)
    saved = folder.load()
    snapshot = None
    if saved is not None:
        trees, meta = saved
        if "recovered_from" in meta:
            watch.notify(meta["recovered_from"])
        snapshot = Snapshot.of(trees, meta["round"], meta["notes"])
    folder.rewind(-1 if snapshot is None else snapshot.state.round)
    settings = Settings(train.rounds, train.evaluate_every, train.select, train.patience, train.target)
    training = Training(fed, chain_of(config), engine, settings, snapshot)
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
        raise CheckpointError(f"{folder.path}: the run is over, and metrics.jsonl holds no record")
    _export(config, fed, folder.path, training)
    notes = training.notes
    result = {"method": str(config.method), "last": record, "best": notes["best"], "reached": notes["reached"]}
    state = training.state
    result["across_clients"] = across_clients(engine, state.params, state.buffers, training.chain)
    engine.deliver(state.params, state.buffers)
    return _finish(folder, result, began)


def warn(fed: Federation, watch: Watch) -> None:
    """Notify about oddities in the data that do not prevent a run."""
    absent = [name for name, count in zip(fed.classes, fed.class_counts.tolist(), strict=True) if count == 0]
    if absent:
        watch.notify(f"no client has a sample of class {', '.join(absent)}")
    if empty := fed.clients - len(fed.eligible):
        watch.notify(f"{empty} of {fed.clients} clients got no samples from the partition and are skipped")


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
    """Write the models of the last and of the best round as files for `predict` and for other programs."""
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
        columns=fed.columns,
        label=_option(config, "label"),
        delimiter=_option(config, "delimiter") or ",",
    )
    predict.save(folder, card, models)


def _option(config: Config, name: str) -> str | None:
    """Return an option of `data.options` if it is a text, else None."""
    value = config.data.options.get(name)
    return value if isinstance(value, str) else None


def describe(fed: Federation) -> dict[str, Any]:
    """Return the content of federation.json."""
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
        "local_test": 0 if fed.held_indices is None else len(fed.held_indices),
    }

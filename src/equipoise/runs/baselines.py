"""The two baselines of federated training: all data at a single client, and every client by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Task
from equipoise.core.errors import DataError
from equipoise.core.federation import Federation
from equipoise.core.round import start
from equipoise.engines import Simulator
from equipoise.runs import metrics
from equipoise.runs.evaluation import confusion_matrix

CENTRALISED, LOCAL = "centralised", "local"  # as `method` in a config


def merge_clients(fed: Federation) -> Federation:
    """Return a federation whose single client holds all samples, for the baseline `centralised`.

    Where the batch size depends on how many samples a client has, it becomes that of a client of mean size.
    """
    rows = fed.indices[fed.offsets[0] : fed.offsets[-1]]
    local = fed.local
    if local.steps_per_epoch is not None or local.batch == "full":
        mean = torch.tensor(max(1, len(rows) // max(1, len(fed.eligible))))
        local = replace(local, batch=int(local.batches(mean)[0]), steps_per_epoch=None)
    held = None if fed.held_indices is None else torch.tensor([0, len(fed.held_indices)])
    return replace(
        fed,
        offsets=torch.tensor([0, len(rows)]),
        indices=rows,
        held_offsets=held,
        cohort=0,
        local=local,
        roster=None,
    )


@torch.no_grad()
def train_alone(fed: Federation, engine: Simulator, rounds: int) -> dict[str, Any]:
    """Train every client by itself for `rounds` rounds, for the baseline `local`; return the mean client's record."""
    if fed.test is None:
        raise DataError("method = 'local': this baseline is measured on a test set, and the data set has none")
    chain = Chain()
    blank = start(fed, chain, engine)
    task = Task(chain, fed.network, fed.local, engine.autocast)
    y = fed.test.y.to(engine.device)
    confusion = torch.zeros(len(fed.classes), len(fed.classes), dtype=torch.int64, device=engine.device)
    for low in range(0, len(fed.eligible), engine.width):
        ids = fed.eligible[low : low + engine.width]
        params, buffers = tree.repeat(blank.params, len(ids)), tree.repeat(blank.buffers, len(ids))
        for round in range(rounds):
            visit = engine.prepare(task, ids, round, 0, params, {}, {})
            result = engine.visit(task, visit, buffers, ids, shared_start=False)
            params, buffers = tree.add(params, result.delta), result.buffers
        for client in range(len(ids)):
            outputs = engine.outputs(tree.rows(params, client), tree.rows(buffers, client), fed.test.x)
            confusion += confusion_matrix(outputs, y)
    # All clients are tested on the same samples, so the recall from the summed matrix is the clients' mean recall.
    record = metrics.summary(confusion, fed.minority, fed.class_counts.tolist())
    return {"round": rounds, "clients": len(fed.eligible), "bytes_up": 0, "bytes_down": 0, **record}

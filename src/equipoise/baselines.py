"""What a federation is measured against: all data in one place, and each site alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from equipoise import metrics, tree
from equipoise.engines import Engine
from equipoise.errors import DataError
from equipoise.evaluation import confusion_matrix
from equipoise.federation import Federation
from equipoise.local import Task
from equipoise.method import Chain
from equipoise.round import start

CENTRALISED, LOCAL = "centralised", "local"


def centralised(fed: Federation) -> Federation:
    """The same samples at a single client, in batches of the size that a client of mean size would use."""
    rows = fed.indices[fed.offsets[0] : fed.offsets[-1]]
    local = fed.local
    if local.steps_per_epoch is not None or local.batch == "full":
        mean = torch.tensor(max(1, len(rows) // max(1, len(fed.eligible))))
        local = replace(local, batch=int(local.batches(mean)[0]), steps_per_epoch=None)
    return replace(fed, offsets=torch.tensor([0, len(rows)]), indices=rows, cohort=0, local=local, roster=None)


@torch.no_grad()
def alone(fed: Federation, engine: Engine, rounds: int) -> dict[str, Any]:
    """Every site trains by itself as long as it would in a federation, and never shares; the mean site's record."""
    if fed.test is None:
        raise DataError("the baseline 'local' needs a test set, and this data set has none")
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
        for site in range(len(ids)):
            outputs = engine.outputs(tree.rows(params, site), tree.rows(buffers, site), fed.test.x)
            confusion += confusion_matrix(outputs, y)
    # Every site answers the same test set, so that the summed matrix gives the mean site's recall.
    record = metrics.summary(confusion, fed.minority, fed.class_counts.tolist())
    return {"round": rounds, "clients": len(fed.eligible), "bytes_up": 0, "bytes_down": 0, **record}

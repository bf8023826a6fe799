"""Builds the federation that a config describes: imbalanced data, divided among clients, and a model."""

from __future__ import annotations

import json
from functools import lru_cache

from equipoise import data, models
from equipoise.core.errors import ConfigError, nearest
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.data.files import data_root
from equipoise.runs.baselines import CENTRALISED, merge_clients
from equipoise.runs.config import SITES, Config


def federate(config: Config) -> Federation:
    """Load the data, make their classes imbalanced, divide them among clients, and build the model."""
    table = config.data
    pool = _pool(table.source, table.dir, json.dumps(table.options, sort_keys=True))
    classes = len(pool.classes)
    fed = data.federate(
        pool,
        lambda: models.build(config.model.name, pool.x.shape[1:], classes, **config.model.options),
        table.partition,
        imbalance=table.imbalance,
        local=Local(**config.local.build(config.train.rounds)),
        cohort=config.train.cohort,
        seed=config.train.seed,
        validation=table.validation,
        auxiliary=table.auxiliary,
        local_test=table.local_test,
        kind=models.kind(config.model.name, pool.x.shape[1:], classes, **config.model.options),
        minority=None if table.minority is None else tuple(label(name, pool.classes) for name in table.minority),
    )
    return merge_clients(fed) if config.method == CENTRALISED else fed


def _pool(source: str, folder: str | None, options: str) -> data.Dataset:
    """Load the samples. Registered data sets are cached for further runs; the user's own files are read again for
    each run, since they may change."""
    if source == SITES:
        raise ConfigError(
            "data.source = 'sites': the data stay with real sites, which join `equipoise serve`; for a simulation,"
            " expected a data set or a file"
        )
    if source not in data.SOURCES:
        return data.load(source, folder, **json.loads(options))
    return _cached(source, str(data_root(folder).absolute()), options)


@lru_cache(maxsize=2)
def _cached(source: str, folder: str, options: str) -> data.Dataset:
    return data.load(source, folder, **json.loads(options))


def label(name: int | str, classes: tuple[str, ...]) -> int:
    """Return the number of a class that a config names by its number or by its name."""
    if isinstance(name, int) and 0 <= name < len(classes):
        return name
    if str(name) in classes:
        return classes.index(str(name))
    raise ConfigError(f"data.minority: there is no class {name!r}; {nearest(name, classes)}")

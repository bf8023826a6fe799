"""Data sources, global class imbalance, and the partition of samples among clients."""

from .building import federate
from .dataset import Dataset
from .dirichlet import Dirichlet, DirichletClients
from .imbalance import (
    IMBALANCES,
    Counts,
    HalfNormal,
    Imbalance,
    Letters,
    Linear,
    LongTail,
    Step,
    Unchanged,
    Zipf,
    minority,
)
from .partition import IID, PARTITIONS, LogNormal, Mix, Natural, PowerLaw, Shards
from .parts import Partition, Partitioner
from .sources import SOURCES, Available, available, load

__all__ = [
    "IID",
    "IMBALANCES",
    "PARTITIONS",
    "SOURCES",
    "Available",
    "Counts",
    "Dataset",
    "Dirichlet",
    "DirichletClients",
    "HalfNormal",
    "Imbalance",
    "Letters",
    "Linear",
    "LogNormal",
    "LongTail",
    "Mix",
    "Natural",
    "Partition",
    "Partitioner",
    "PowerLaw",
    "Shards",
    "Step",
    "Unchanged",
    "Zipf",
    "available",
    "federate",
    "load",
    "minority",
]

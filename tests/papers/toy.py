"""A made-up paper: two tables on the digits that train in seconds and share a cell."""

from __future__ import annotations

from equipoise.papers.experiment import Experiment, parse

DOCUMENT = """
paper = "A toy"
baseline = "fedavg"

[base]
data = { source = "digits", imbalance = { kind = "step", minority = [0] }, partition = { kind = "iid", clients = 4 } }
model.name = "logistic"
local = { lr = 0.1, batch = 64 }
train = { rounds = 4, threads = 1, device = "cpu", target = 0.5 }

[fragments.skewed]
data.partition = { kind = "dirichlet", clients = 4, alpha = 1.0 }

[methods]
fedavg = "fedavg"
prox = "fedprox(mu={mu})"
pair = { method = "fedavg", train.cohort = 2, when.even.train.cohort = 3 }

[extra]
shifted = "fedshift(prior='uniform')"

[[guesses]]
what = "everything"
value = "something"
evidence = "none"
[[departures]]
only = ["first"]
what = "a departure"

[experiments.first]
title = "Table 1"
let.mu = 0.1
measures = { minority_accuracy = "", accuracy = "", rounds_to_target = "" }
axes.split = { even = {}, skewed = { use = ["skewed"], let.mu = 0.5 } }
axes.rho = { path = "data.imbalance.rho", values = [2, 4.0] }

[experiments.second]
title = "Table 2"
let.mu = 0.1
measures = { best_accuracy = "", rounds_to_baseline = "" }
axes.rho = { path = "data.imbalance.rho", values = [4] }
"""


def experiments() -> tuple[Experiment, Experiment]:
    first, second = parse("toy", DOCUMENT)
    return first, second

"""The papers' tables and figures as data: what was published, how to rerun it, and both compared."""

from equipoise.papers.experiment import Cell, Experiment, Guess, choose, experiments, find

__all__ = ["Cell", "Experiment", "Guess", "choose", "experiments", "find"]

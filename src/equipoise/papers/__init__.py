"""The papers' tables and figures as data: what was published, how each is rerun, and the two side by side."""

from equipoise.papers.experiment import Cell, Experiment, Guess, choose, experiments, find

__all__ = ["Cell", "Experiment", "Guess", "choose", "experiments", "find"]

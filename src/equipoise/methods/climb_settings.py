"""The settings of CLIMB, and the constants of published runs, which `climb(preset=...)` selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from equipoise.core.errors import ConfigError
from equipoise.core.method import Method
from equipoise.methods.shared.checks import above, at_least, one_of, whole


class Constants(NamedTuple):
    """The settings that a preset determines; `ClimbSettings` explains them."""

    eta: float
    epsilon: float
    cap: float = 5.0
    scale: str = "mean"
    timing: str = "fresh"
    slack: float | None = None
    slack_eta: float = 0.1


DEFAULT = Constants(eta=0.1, epsilon=0.002, slack_eta=0.001)  # those of the preset "mnist" with 100 clients
NO_CAP = float("inf")

# In presets, eta and slack_eta are still to be divided by the number of clients, as the authors' scripts do. The two
# `_reference` presets are those of the authors' code, in which a client's loss is a sum over five batches. The first
# two presets express the same for the mean loss of the new model.
PRESETS = {
    "mnist": Constants(eta=10.0, epsilon=0.002),
    "cifar10": Constants(eta=0.5, epsilon=0.02),
    "mnist_reference": Constants(eta=2.0, epsilon=0.01, scale="batch_sum", timing="stale"),
    "cifar10_reference": Constants(eta=0.1, epsilon=0.1, scale="batch_sum", timing="stale"),
    "mnist_resilient": Constants(eta=0.1, epsilon=0.02, cap=NO_CAP, slack=1.0),
    "fashion_mnist_resilient": Constants(eta=2.0, epsilon=0.01, cap=NO_CAP, slack=1.0),
    "cifar10_resilient": Constants(eta=2.0, epsilon=0.02, cap=NO_CAP, slack=1.0),
}
CHOICES = {
    "preset": tuple(PRESETS),
    "over": ("all", "cohort"),
    "scale": ("mean", "batch_sum"),
    "timing": ("fresh", "stale"),
    "negative": ("keep", "clip"),
    "weighting": ("uniform", "size"),
}


@dataclass(frozen=True)
class ClimbSettings(Method, abstract=True):
    preset: str | None = None  # a published run, whose constants are used where none are given
    eta: float | None = None  # the length of a dual step
    epsilon: float | None = None  # the tolerance
    cap: float | None = None  # the largest multiplier
    every: int = 5  # rounds between two dual steps
    over: Literal["all", "cohort"] = "all"  # which clients are asked for their losses and make a dual step
    scale: Literal["mean", "batch_sum"] | None = None  # a client's loss: mean over samples, or sum over batches
    timing: Literal["fresh", "stale"] | None = None  # losses of the new model, or of the one `every` rounds older
    negative: Literal["keep", "clip"] = "keep"  # negative weights: kept, as in the paper, or raised to zero
    # The weights of clients in all three means: of deltas, losses and multipliers.
    weighting: Literal["uniform", "size"] = "uniform"
    slack: float | None = None  # the price of slack in the resilient variant; None: no slack
    slack_eta: float | None = None  # the length of a step of the slack

    def __post_init__(self) -> None:
        given = {name for name in (*CHOICES, *Constants._fields) if getattr(self, name) is not None}
        for field in given & set(CHOICES):
            one_of(self, field, CHOICES[field])
        for field in given & {"eta", "epsilon", "slack_eta"}:
            at_least(self, field, 0)
        for field in given & {"cap", "slack"}:
            above(self, field, 0)
        whole(self, "every", 1)
        if self.over == "cohort" and self.constants().timing == "stale":
            raise ConfigError(
                f"method: {self.name}(over='cohort'): expected timing='fresh', since the clients of this cohort may"
                " not have kept a loss at the last dual step"
            )

    def constants(self, clients: int = 1) -> Constants:
        """Return the constants for a federation of `clients` clients. Settings that are given override the preset."""
        base = DEFAULT
        if self.preset is not None:
            published = PRESETS[self.preset]
            base = published._replace(eta=published.eta / clients, slack_eta=published.slack_eta / clients)
        return base._replace(**{k: v for k in Constants._fields if (v := getattr(self, k)) is not None})

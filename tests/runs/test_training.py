"""The training loop: records, the best round, early stopping, the target, and resuming bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.engine import Engine
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation, Split
from equipoise.core.method import FedAvg, Method
from equipoise.core.tree import Tree
from equipoise.engines import Serial
from equipoise.methods import ClassWeights, Climb, FedAdam, FedProx, FedRE, Scaffold
from equipoise.runs import checkpoint, evaluation
from equipoise.runs.training import Settings, Snapshot, Training, fit
from tests.federations import federation, image_federation, norm_cnn
from tests.toys import Even, Visits

ALWAYS = {
    "round", "clients", "samples", "loss", "accuracy", "balanced_accuracy", "macro_f1", "minority_accuracy",
    "minority_mean", "worst_class", "worst_class_accuracy", "head", "middle", "tail", "recall", "precision", "counts",
    "confusion", "bytes_up", "bytes_down", "seconds",
}  # fmt: skip
SCORES = {"auroc", "auprc", "recall_at_fpr_1", "recall_at_fpr_5"}
AT_THE_END = SCORES | {f"{name}_by_class" for name in SCORES} | {"calibration_error"}
VALIDATION = {f"validation_{name}" for name in ("loss", "accuracy", "balanced_accuracy", "minority_accuracy")}


def validated(fed: Federation | None = None) -> Federation:
    """A federation with a validation set: every third sample of the test set."""
    fed = fed or federation()
    assert fed.test is not None
    return replace(fed, validation=Split(fed.test.x[::3], fed.test.y[::3]))


# -- records


def test_records_have_their_keys() -> None:
    outcome = fit(federation(), FedAvg(), 3)
    assert [set(record) for record in outcome.records] == [ALWAYS, ALWAYS, ALWAYS | AT_THE_END]
    assert [record["round"] for record in outcome.records] == [1, 2, 3]
    assert outcome.last is outcome.records[-1]
    assert outcome.method == "fedavg"


def test_records_of_validation_and_of_methods() -> None:
    outcome = fit(validated(), Even() + FedProx(mu=0.1), 2)
    assert set(outcome.records[0]) == ALWAYS | VALIDATION | {"even.clients"}
    assert outcome.records[0]["even.clients"] == 4
    assert outcome.method == "tests.toys:Even + fedprox(mu=0.1)"


def test_bytes_add_up_over_rounds() -> None:
    records = fit(federation(), FedAvg(), 3).records
    assert [r["bytes_down"] for r in records] == [records[0]["bytes_down"] * k for k in (1, 2, 3)]
    assert [r["bytes_up"] for r in records] == [records[0]["bytes_up"] * k for k in (1, 2, 3)]


def test_bytes_of_questions_and_of_training_before_the_first_round_count() -> None:
    fed = federation(cohort=0)
    model = tree.nbytes(fed.network.params)
    down, up = (fit(fed, FedAvg(), 1).last[name] for name in ("bytes_down", "bytes_up"))
    once, twice = fit(fed, ClassWeights(rule="inverse"), 2).records
    assert once["bytes_up"] - up == 6 * 3 * 8 == twice["bytes_up"] - 2 * up  # each client sends its class counts once
    assert fit(fed, Climb(every=1), 1).last["bytes_down"] - down > 6 * model  # the new model, to measure its loss
    assert fit(fed, FedRE(), 1).last["bytes_down"] >= 2 * down  # all clients train once before the first round


def test_training_learns() -> None:
    outcome = fit(federation(sizes=(30,) * 6, cohort=0), FedAvg(), 15)
    assert outcome.records[-1]["loss"] < 0.7 * outcome.records[0]["loss"]
    assert outcome.records[-1]["accuracy"] > 0.8


@pytest.mark.parametrize(("every", "rounds", "seen"), [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (10, 3, [3])])
def test_evaluation_in_some_rounds_and_always_in_the_last(every: int, rounds: int, seen: list[int]) -> None:
    fed = federation()
    steps = list(Training(fed, FedAvg(), Stacked(fed), Settings(rounds, evaluate_every=every)))
    assert [step.round for step in steps] == list(range(1, rounds + 1))
    assert [step.record["round"] for step in steps if step.record is not None] == seen
    assert [step.last for step in steps] == [False] * (rounds - 1) + [True]


def test_without_a_test_set_nothing_is_measured() -> None:
    outcome = fit(replace(federation(), test=None), FedAvg(), 2)
    assert set(outcome.last) == {"round", "clients", "samples", "bytes_up", "bytes_down", "seconds"}
    assert outcome.best is None


def test_without_a_test_set_the_validation_set_is_used() -> None:
    outcome = fit(replace(validated(), test=None), FedAvg(), 2)
    assert outcome.last["accuracy"] == outcome.last["validation_accuracy"]
    assert outcome.best is not None
    assert outcome.best["on"] == "validation"


def test_a_test_set_of_one_class() -> None:
    fed = federation()
    assert fed.test is not None
    only = fed.test.y == 1
    outcome = fit(replace(fed, test=Split(fed.test.x[only], fed.test.y[only])), FedAvg(), 2)
    assert outcome.last["accuracy"] == outcome.last["balanced_accuracy"] == outcome.last["recall"][1]
    assert outcome.last["recall"][0] is outcome.last["recall"][2] is None
    assert outcome.last["minority_accuracy"] is None  # class 0 is the minority
    assert outcome.last["auroc"] is None
    assert all(not (isinstance(v, float) and math.isnan(v)) for v in outcome.last.values())


# -- the best round, stopping, the target


class Script:
    """Replaces `evaluate`: returns given values, one per round for the test set and one for the validation set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, test: list[float], validation: list[float]) -> None:
        self.values = {"test": iter(test), "validation": iter(validation)}
        self.scored: list[bool] = []
        monkeypatch.setattr(evaluation, "evaluate", self.evaluate)

    def evaluate(self, engine: Engine, params: Tree, buffers: Tree, split: Split, *, scores: bool) -> dict[str, Any]:
        name = "test" if split is engine.fed.test else "validation"
        if name == "test":
            self.scored.append(scores)
        value = next(self.values[name])
        return dict.fromkeys(("loss", "accuracy", "balanced_accuracy", "minority_accuracy"), value)


def test_the_best_round_is_chosen_on_validation_data(monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch, test=[0.9, 0.5, 0.6, 0.7], validation=[0.1, 0.3, 0.8, 0.8])
    fed = validated()
    training = Training(fed, FedAvg(), Stacked(fed), Settings(rounds=4))
    models = [step.training.state.params for step in training]
    best = training.notes["best"]
    assert (best["value"], best["on"], best["record"]["round"], best["record"]["accuracy"]) == (
        0.8,
        "validation",
        3,
        0.6,
    )
    assert all(torch.equal(training.best["params"][k], models[2][k]) for k in models[2])
    assert not torch.equal(training.best["params"]["0.weight"], models[3]["0.weight"])


def test_without_validation_the_best_is_labelled_as_on_the_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch, test=[0.2, 0.9, 0.5], validation=[])
    outcome = fit(federation(), FedAvg(), 3)
    assert outcome.best is not None
    assert (outcome.best["value"], outcome.best["on"], outcome.best["record"]["round"]) == (0.9, "test", 2)


def test_the_measure_of_the_best_may_be_chosen() -> None:
    outcome = fit(federation(), FedAvg(), 4, select="accuracy")
    assert outcome.best is not None
    assert outcome.best["value"] == max(record["accuracy"] for record in outcome.records)


@pytest.mark.parametrize(
    ("validation", "patience", "every", "stops"),
    [
        ([0.1, 0.2, 0.2, 0.1, 0.9], 2, 1, 4),
        ([0.1, 0.2, 0.1, 0.3, 0.2, 0.2, 0.9], 2, 1, 6),
        ([0.5, 0.4, 0.9], 3, 2, 6),  # at round 4, only two rounds have passed without a better one
        ([0.1, 0.2, 0.3, 0.4], 1, 1, 4),
    ],
)
def test_early_stopping(
    monkeypatch: pytest.MonkeyPatch, validation: list[float], patience: int, every: int, stops: int
) -> None:
    script = Script(monkeypatch, test=[0.0] * 9, validation=validation)
    fed = validated()
    rounds = every * len(validation)
    steps = list(Training(fed, FedAvg(), Stacked(fed), Settings(rounds, every, patience=patience)))
    assert steps[-1].round == stops
    assert [step.last for step in steps] == [False] * (stops - 1) + [True]
    assert script.scored[-1]  # the last record has the scores, also after an early stop


@pytest.mark.parametrize(
    ("accuracies", "target", "reached"), [([0.1, 0.5, 0.4, 0.6], 0.5, 2), ([0.1, 0.2, 0.3, 0.4], 0.5, None)]
)
def test_the_first_round_that_reaches_the_target(
    monkeypatch: pytest.MonkeyPatch, accuracies: list[float], target: float, reached: int | None
) -> None:
    Script(monkeypatch, test=accuracies, validation=[])
    fed = federation()
    training = Training(fed, FedAvg(), Stacked(fed), Settings(rounds=4, target=target))
    assert len(list(training)) == 4  # training continues after the target is reached
    assert training.notes["reached"] == reached


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rounds": 0}, "train.rounds = 0: expected a whole number, 1 or above"),
        ({"rounds": 2.5}, "train.rounds = 2.5: expected a whole number, 1 or above"),
        ({"evaluate_every": 0}, "train.evaluate_every = 0: expected a whole number, 1 or above"),
        ({"patience": 0}, "train.patience = 0: expected a whole number, 1 or above, or nothing"),
        ({"target": 1.5}, "train.target = 1.5: expected a share above 0 and at most 1, or nothing"),
        ({"select": "acuracy"}, r"train.select = 'acuracy': expected .*; did you mean 'accuracy'\?"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Settings(**settings)


def test_early_stopping_needs_validation_data() -> None:
    with pytest.raises(ConfigError, match=r"train.patience = 1: early stopping needs validation samples"):
        fit(federation(), FedAvg(), 2, patience=1)


def test_choosing_the_best_round_by_the_minority_needs_a_minority() -> None:
    with pytest.raises(ConfigError, match=r"train.select = 'minority_accuracy': there is no minority class"):
        fit(replace(federation(), minority=()), FedAvg(), 2, select="minority_accuracy")


# -- resuming

METHODS: list[Method] = [FedAvg(), Scaffold() + FedAdam(lr=0.05), Visits() + Even()]


def everything(training: Training) -> Tree:
    taken = training.snapshot()
    return {**tree.flatten(taken.trees()["state"]), **tree.flatten(taken.memory), **tree.flatten(taken.best)}


@pytest.mark.parametrize("make", [Stacked, Serial])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: str(m))
def test_a_resumed_training_ends_in_the_same_bits(
    method: Method, make: Callable[[Federation], Engine], tmp_path: Path
) -> None:
    fed = validated(image_federation(norm_cnn()))
    settings = Settings(rounds=5, target=0.4, patience=4)
    whole = Training(fed, method, make(fed), settings)
    records = [step.record for step in whole]
    first = Training(fed, method, make(fed), settings)
    steps = iter(first)
    for _ in range(2):
        step = next(steps)
    taken = step.snapshot()
    next(steps)  # a snapshot does not change when the training goes on
    checkpoint.save(tmp_path, taken.trees(), {"round": taken.state.round, "notes": taken.notes})
    trees, meta = checkpoint.load(tmp_path)
    again = Training(fed, method, make(fed), settings, Snapshot.of(trees, meta["round"], meta["notes"]))
    rest = [step.record for step in again]
    assert [r["round"] for r in rest if r is not None] == [3, 4, 5]
    one, other = everything(whole), everything(again)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for before, after in zip(records[2:], rest, strict=True):
        assert before is not None
        assert after is not None
        assert {k: v for k, v in before.items() if k != "seconds"} == {
            k: v for k, v in after.items() if k != "seconds"
        }
    kept = [{k: v for k, v in t.notes.items() if k != "best"} for t in (whole, again)]
    assert kept[0] == kept[1]
    assert whole.notes["best"]["record"]["round"] == again.notes["best"]["record"]["round"]


def test_a_finished_training_has_nothing_left_to_do() -> None:
    fed = federation()
    training = Training(fed, FedAvg(), Stacked(fed), Settings(rounds=2))
    list(training)
    again = Training(fed, FedAvg(), Stacked(fed), Settings(rounds=2), training.snapshot())
    assert list(again) == []
    assert again.state.round == 2


def test_a_finished_training_can_be_continued_with_more_rounds() -> None:
    fed = federation()
    short = Training(fed, FedAvg(), Stacked(fed), Settings(rounds=2))
    list(short)
    longer = Training(fed, FedAvg(), Stacked(fed), Settings(rounds=4), short.snapshot())
    list(longer)
    whole = fit(fed, FedAvg(), 4).state.params
    assert all(torch.equal(longer.state.params[k], whole[k]) for k in whole)

"""Evaluation of a model: on test samples, and on the training samples of each client."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.federation import Federation, Split
from equipoise.core.network import Network
from equipoise.core.round import start
from equipoise.engines import Serial
from equipoise.runs.evaluation import across_clients, confusion_matrix, evaluate
from tests.federations import dropout_cnn, federation, image_federation
from tests.reference.loop import client_rows


def identity(classes: int = 3) -> nn.Module:
    """A model whose scores are its inputs."""
    module = nn.Linear(classes, classes, bias=False)
    nn.init.eye_(module.weight)
    return module


def known(scores: list[list[float]], y: list[int]) -> Federation:
    x = torch.tensor(scores)
    labels = torch.tensor(y)
    fed = replace(federation(), network=Network(identity()), x=x, y=labels, minority=(2,))
    return replace(
        fed, offsets=torch.tensor([0, 2, len(y)]), indices=torch.arange(len(y)), test=Split(x, labels)
    )  # fmt: skip


SCORES = [[9.0, 0, 0], [0, 9, 0], [0, 9, 0], [0, 0, 9], [9, 0, 0]]
LABELS = [0, 1, 0, 2, 2]


def test_confusion_has_truth_in_rows_and_predictions_in_columns() -> None:
    matrix = confusion_matrix(torch.tensor(SCORES), torch.tensor(LABELS))
    assert matrix.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]


def test_a_record_by_hand() -> None:
    fed = known(SCORES, LABELS)
    engine = Stacked(fed, precision="float64")
    assert fed.test is not None
    state = start(fed, Chain(), engine)
    record = evaluate(engine, state.params, state.buffers, fed.test)
    right, wrong = -math.log(math.exp(9) / (math.exp(9) + 2)), math.log(math.exp(9) + 2)
    assert record["loss"] == pytest.approx((3 * right + 2 * wrong) / 5, rel=1e-12)
    assert record["accuracy"] == 3 / 5
    assert record["recall"] == [0.5, 1.0, 0.5]
    assert record["balanced_accuracy"] == pytest.approx(2 / 3)
    assert record["minority_accuracy"] == 0.5
    assert record["counts"] == [2, 1, 2]
    assert record["confusion"] == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]
    assert record["auroc_by_class"][1] == pytest.approx(1 - 0.5 * 1 / 4)  # one of the other four has the same score


def test_scores_only_when_asked() -> None:
    fed = known(SCORES, LABELS)
    engine = Stacked(fed)
    assert fed.test is not None
    with_scores, without = (
        evaluate(engine, engine.place(fed.network.params), {}, fed.test, scores=s) for s in (True, False)
    )
    assert set(with_scores) - set(without) >= {"auroc", "auprc", "calibration_error"}
    assert set(without) <= set(with_scores)


@pytest.mark.parametrize("label", [0, 1, 2])
def test_a_test_set_of_a_single_class(label: int) -> None:
    fed = known(SCORES, LABELS)
    engine = Stacked(fed)
    only = Split(torch.tensor(SCORES), torch.full((5,), label))
    record = evaluate(engine, engine.place(fed.network.params), {}, only)
    assert [value is None for value in record["recall"]] == [label != c for c in range(3)]
    assert record["auroc"] is None
    assert record["worst_class"] == label
    assert all(not (isinstance(value, float) and math.isnan(value)) for value in record.values())


def test_evaluation_uses_no_dropout_and_is_deterministic() -> None:
    torch.manual_seed(0)
    fed = image_federation(dropout_cnn())
    engine = Stacked(fed)
    assert fed.test is not None
    state = start(fed, Chain(), engine)
    one, other = (evaluate(engine, state.params, state.buffers, fed.test) for _ in range(2))
    assert one == other
    module = fed.network.module.eval()
    with torch.no_grad():
        expected = nn.functional.cross_entropy(module(fed.test.x), fed.test.y).item()
    assert one["loss"] == pytest.approx(expected, rel=1e-5)


def test_evaluation_in_another_precision_is_close() -> None:
    fed = federation()
    assert fed.test is not None
    records = []
    for precision in ("float64", "float32", "bf16"):
        engine = Stacked(fed, precision=precision)
        state = start(fed, Chain(), engine)
        records.append(evaluate(engine, state.params, state.buffers, fed.test))
    assert records[1]["loss"] == pytest.approx(records[0]["loss"], rel=1e-5)
    assert records[2]["loss"] == pytest.approx(records[0]["loss"], rel=3e-2)


@pytest.mark.parametrize("make", [Stacked, Serial])
def test_the_spread_over_clients(make: type[Stacked]) -> None:
    fed = federation(sizes=(7, 0, 12, 1))
    engine = make(fed, precision="float64")
    state = start(fed, Chain(), engine)
    spread = across_clients(engine, state.params, state.buffers)
    losses, accuracies = [], []
    for client in (0, 2, 3):
        rows = client_rows(fed, client)
        outputs = engine.outputs(state.params, state.buffers, fed.x[rows])
        losses.append(nn.functional.cross_entropy(outputs, fed.y[rows]).item())
        accuracies.append((outputs.argmax(-1) == fed.y[rows]).double().mean().item())
    assert spread["client_loss"]["mean"] == pytest.approx(sum(losses) / 3)
    assert spread["client_loss"]["max"] == pytest.approx(max(losses))
    assert spread["client_accuracy"]["min"] == pytest.approx(min(accuracies))
    assert spread["client_loss"]["count"] == spread["client_accuracy"]["count"] == 3
    assert across_clients(engine, state.params, state.buffers, most=2)["client_loss"]["count"] == 2

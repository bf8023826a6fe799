from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    precision_score,
    recall_score,
    roc_auc_score,
    roc_curve,
)
from torch import Tensor

from equipoise.core.errors import ConfigError, DataError
from equipoise.runs import metrics


@pytest.fixture
def predictions() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    y = draw.choice(5, 800, p=[0.4, 0.3, 0.2, 0.07, 0.03])
    return y, np.where(draw.random(800) < 0.6, y, draw.integers(0, 5, 800))


def scored(samples: int, scale: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes, the third rare; `scale` multiplies the model's logits."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor([0.55, 0.4, 0.05]), samples, replacement=True, generator=draw)
    logits = torch.randn(samples, 3, generator=draw, dtype=torch.float64)
    logits[torch.arange(samples), y] += 1.3
    return torch.softmax(scale * logits, dim=1), y


def test_confusion_agrees_with_scikit_learn(predictions: tuple[np.ndarray, np.ndarray]) -> None:
    y, guess = predictions
    result = metrics.summary(confusion_matrix(y, guess), [3, 4], np.bincount(y).tolist())
    each = recall_score(y, guess, average=None)
    assert result["accuracy"] == pytest.approx((y == guess).mean(), abs=1e-15)
    assert result["recall"] == pytest.approx(each)
    assert result["precision"] == pytest.approx(precision_score(y, guess, average=None))
    assert result["macro_f1"] == pytest.approx(f1_score(y, guess, average="macro"))
    assert result["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, guess))
    assert result["worst_class"] == each.argmin()
    assert result["worst_class_accuracy"] == pytest.approx(each.min())
    assert result["minority_accuracy"] == pytest.approx(min(each[3], each[4]))
    assert result["minority_mean"] == pytest.approx((each[3] + each[4]) / 2)
    assert result["head"] == pytest.approx(each[:2].mean())
    assert result["middle"] == pytest.approx(each[2])
    assert result["tail"] == pytest.approx(each[3:].mean())
    assert result["counts"] == np.bincount(y).tolist()
    assert result["confusion"] == confusion_matrix(y, guess).tolist()


def test_summary_is_json_and_the_same_for_a_tensor(predictions: tuple[np.ndarray, np.ndarray]) -> None:
    matrix = confusion_matrix(*predictions)
    result = metrics.summary(matrix, [4], [5, 4, 3, 2, 1])
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert metrics.summary(torch.from_numpy(matrix), [4], [5, 4, 3, 2, 1]) == result
    assert metrics.summary(matrix.tolist(), [4], [5, 4, 3, 2, 1]) == result


def test_an_absent_class_is_none_and_left_out_of_means() -> None:
    result = metrics.summary([[6, 2, 0], [0, 0, 0], [1, 0, 1]], [1, 2], [10, 5, 2])
    assert result["recall"] == [0.75, None, 0.5]
    assert result["precision"] == [pytest.approx(6 / 7), 0.0, 1.0]
    assert result["balanced_accuracy"] == 0.625
    assert result["macro_f1"] == pytest.approx((12 / 15 + 2 / 3) / 2)
    assert (result["worst_class"], result["worst_class_accuracy"]) == (2, 0.5)
    assert (result["minority_accuracy"], result["minority_mean"]) == (0.5, 0.5)
    assert (result["head"], result["middle"], result["tail"]) == (0.75, None, 0.5)


def test_a_client_with_one_class() -> None:
    result = metrics.summary([[0, 0], [1, 3]], [0])
    assert result["recall"] == [None, 0.75]
    assert result["precision"] == [0.0, 1.0]
    assert result["accuracy"] == result["balanced_accuracy"] == 0.75
    assert result["minority_accuracy"] is None
    assert result["head"] is result["middle"] is result["tail"] is None


def test_a_class_never_predicted_has_no_precision_but_an_f1_of_zero() -> None:
    assert metrics.precision([[4, 0], [2, 0]]) == [pytest.approx(4 / 6), None]
    assert metrics.f1([[4, 0], [2, 0]]) == [0.8, 0.0]


@pytest.mark.parametrize("matrix", [np.zeros((3, 3), int), torch.zeros(3, 3, dtype=torch.int64), []])
def test_an_empty_matrix_is_none_throughout(matrix: Tensor) -> None:
    result = metrics.summary(matrix)
    lists = {key: result.pop(key) for key in ("recall", "precision", "counts", "confusion")}
    assert set(result.values()) == {None}
    assert set(lists["recall"]) <= {None}


def test_ties_go_to_the_first_class() -> None:
    assert metrics.worst_class([[1, 1, 0], [1, 1, 0], [0, 0, 1]]) == (0, 0.5)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([10, 30, 20], ([1], [2], [0])),
        ([5, 9], ([1], [], [0])),
        ([9, 9, 9, 1, 9, 9, 9, 9, 9, 9], ([0, 1, 2], [4, 5, 6, 7], [8, 9, 3])),
        ([7, 7, 7], ([], [], [])),
        ([7], ([], [], [])),
        ([], ([], [], [])),
    ],
)
def test_thirds(counts: list[int], expected: tuple[list[int], ...]) -> None:
    assert metrics.thirds(counts) == expected


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="minority class 2 does not exist; expected a number from 0 to 1"):
        metrics.summary(np.eye(2, dtype=int), [2])
    with pytest.raises(DataError, match="train_counts has 3 entries; expected 2, one per class"):
        metrics.summary(np.eye(2, dtype=int), [], [1, 2, 3])
    with pytest.raises(DataError, match=r"shape \(2, 3\); expected one row and one column per class"):
        metrics.accuracy(np.ones((2, 3), int))


@pytest.mark.parametrize(("scale", "tolerance"), [(0.05, 4e-3), (1.0, 5e-4), (4.0, 5e-4)])
def test_areas_agree_with_scikit_learn(scale: float, tolerance: float) -> None:
    # A barely trained model, whose scores fall into a few bins; a calibrated one; an over-confident one.
    p, y = scored(6000, scale)
    histogram = metrics.histograms(p, y)
    for label in range(3):
        own = (y == label).numpy()
        auroc, auprc = roc_auc_score(own, p[:, label]), average_precision_score(own, p[:, label])
        fpr, tpr, _ = roc_curve(own, p[:, label], drop_intermediate=False)
        assert metrics.auroc(histogram)[label] == pytest.approx(auroc, abs=tolerance)
        assert metrics.auprc(histogram)[label] == pytest.approx(auprc, abs=4 * tolerance)
        for rate in (0.01, 0.05):
            exact = tpr[fpr <= rate].max()
            assert metrics.recall_at(histogram, rate)[label] == pytest.approx(exact, abs=0.02)


def test_areas_are_exact_when_no_bin_is_shared() -> None:
    p, y = scored(60, 1.0, seed=1)
    histogram = metrics.histograms(p, y, bins=200_000)
    assert histogram.sum(dim=1).max() == 1
    for label in range(3):
        own = (y == label).numpy()
        assert metrics.auroc(histogram)[label] == pytest.approx(roc_auc_score(own, p[:, label]), abs=1e-14)
        assert metrics.auprc(histogram)[label] == pytest.approx(average_precision_score(own, p[:, label]), abs=1e-12)


def test_areas_are_expected_values_over_random_orders_within_a_bin() -> None:
    histogram = torch.tensor([[[0, 1, 0, 3], [0, 0, 2, 2]]])
    # From the highest bin down: five samples in any order, two of them positive; two positives; a negative.
    orders = [[int(j in own) for j in range(5)] + [1, 1, 0] for own in itertools.combinations(range(5), 2)]
    auprc = np.mean([average_precision_score(order, -np.arange(8)) for order in orders])
    auroc = np.mean([roc_auc_score(order, -np.arange(8)) for order in orders])
    assert metrics.auprc(histogram) == [pytest.approx(auprc, abs=1e-14)]
    assert metrics.auroc(histogram) == [pytest.approx(auroc, abs=1e-14)]


def test_histograms_add_up_over_parts_and_accept_extreme_scores() -> None:
    p, y = scored(500, 2.0)
    whole = metrics.histograms(p, y, bins=64)
    assert torch.equal(whole, metrics.histograms(p[:200], y[:200], 64) + metrics.histograms(p[200:], y[200:], 64))
    assert whole.shape == (3, 2, 64)
    assert whole[:, 1].sum(dim=1).tolist() == torch.bincount(y).tolist()
    edge = metrics.histograms(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 0]), bins=8)
    assert edge[:, 1, -1].tolist() == edge[:, 0, 0].tolist() == [1, 1]
    nothing = metrics.histograms(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), bins=8)
    assert nothing.sum() == 0
    unknown = metrics.histograms(torch.tensor([[math.nan, math.nan]]), torch.tensor([1]), bins=8)
    assert unknown[0, 0, 0] == unknown[1, 1, 0] == unknown.sum() - 1 == 1


def test_sums_leave_out_masked_samples_and_work_for_stacked_clients() -> None:
    p, y = scored(40, 1.0)
    mask = torch.arange(40) % 3 > 0
    for make in (metrics.histograms, metrics.reliability):
        torch.testing.assert_close(make(p, y, 16, mask), make(p[mask], y[mask], 16))
        stacked = torch.func.vmap(lambda p, y, mask, make=make: make(p, y, 16, mask))(
            p.view(2, 20, 3), y.view(2, 20), mask.view(2, 20)
        )
        torch.testing.assert_close(stacked[1], make(p[20:], y[20:], 16, mask[20:]))


def test_a_class_without_positive_or_negative_samples_has_no_curve() -> None:
    p = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    result = metrics.scores(metrics.histograms(p, torch.tensor([0, 0])))
    assert result["auroc_by_class"] == result["auprc_by_class"] == [None, None]
    assert result["recall_at_fpr_1_by_class"] == [None, None]
    assert result["auroc"] is result["auprc"] is result["recall_at_fpr_5"] is result["calibration_error"] is None


def test_a_perfect_and_a_blind_model() -> None:
    y = torch.tensor([0] * 50 + [1] * 50)
    perfect = torch.eye(2)[y] * 0.98 + 0.01
    result = metrics.scores(metrics.histograms(perfect, y), metrics.reliability(perfect, y))
    assert result["auroc"] == result["auprc"] == result["recall_at_fpr_1"] == 1.0
    assert result["calibration_error"] == pytest.approx(0.01)
    blind = metrics.scores(metrics.histograms(torch.full((100, 2), 0.5), y))
    assert blind["auroc"] == 0.5
    assert blind["recall_at_fpr_5"] == pytest.approx(0.05)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_recall_at_follows_the_roc_curve() -> None:
    histogram = torch.tensor(
        [[[60, 30, 10, 0], [1, 2, 3, 4]]]
    )  # from the top bin: fpr 0, .1, .4, 1; tpr .4, .7, .9, 1
    for rate, value in [(0.0, 0.4), (0.05, 0.55), (0.1, 0.7), (0.25, 0.8), (1.0, 1.0)]:
        assert metrics.recall_at(histogram, rate) == [pytest.approx(value)]


def test_calibration_error_by_hand() -> None:
    p = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.25, 0.75], [0.35, 0.65]])
    y = torch.tensor([0, 1, 1, 1])
    table = metrics.reliability(p, y, bins=10)
    assert table[9].tolist() == pytest.approx([2, 1.9, 1])
    assert table[:, 0].sum() == 4
    assert metrics.calibration_error(table) == pytest.approx((0.9 + 0.25 + 0.35) / 4)
    parts = metrics.reliability(p[:1], y[:1], bins=10) + metrics.reliability(p[1:], y[1:], bins=10)
    torch.testing.assert_close(parts, table)
    assert metrics.calibration_error(torch.zeros(10, 3)) is None


def test_spread_leaves_out_missing_values() -> None:
    result = metrics.spread([0.0, 1.0, None, 0.5, math.nan, 0.25, 0.75])
    assert result == pytest.approx(
        {
            "mean": 0.5,
            "std": np.std([0, 0.25, 0.5, 0.75, 1]),
            "min": 0.0,
            "p10": 0.1,
            "median": 0.5,
            "p90": 0.9,
            "max": 1.0,
            "count": 5,
        }
    )
    empty = metrics.spread([None])
    assert empty.pop("count") == 0
    assert list(empty) == ["mean", "std", "min", "p10", "median", "p90", "max"]
    assert set(empty.values()) == {None}


def test_the_interval_uses_students_t() -> None:
    mean, half = metrics.interval([0.6, None, 0.7, 0.8])
    assert mean == pytest.approx(0.7)
    assert half == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)  # t(.975, 2 degrees of freedom)
    assert metrics.interval([0.6]) == (0.6, None)
    assert metrics.interval([]) == (None, None)


def test_best_and_rounds_to() -> None:
    values = [None, 0.3, 0.8, math.nan, 0.8, 0.5]
    records = [{"round": 5 * i, "accuracy": value} for i, value in enumerate(values)] + [{"round": 99}]
    assert metrics.best(records) is records[2]
    assert metrics.best(records, "macro_f1") is None
    assert metrics.rounds_to(records, 0.3) == 5
    assert metrics.rounds_to(records, 0.5) == 10
    assert metrics.rounds_to(records, 0.9) is None
    assert metrics.rounds_to([{"round": 2, "tail": 0.5}], 0.5, key="tail") == 2

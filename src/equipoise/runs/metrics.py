"""Metrics of a model, overall and for each class, from sums over samples: clients need not show a single sample.

All metrics come from three sums. A confusion matrix ([classes, classes], rows true, columns predicted) gives
accuracy, recall, precision and what follows from them. Score histograms ([classes, 2, bins]) give the areas
under the ROC and precision-recall curves. A reliability table ([bins, 3]) gives the calibration error.

A value that is not defined is `None`, never NaN: the recall of a class absent from the test set, the precision of a
class that is never predicted, the AUROC of a class that all samples belong to. Means leave such values out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equipoise.core.errors import ConfigError, DataError

Value = float | None
Array = npt.NDArray[Any]
Matrix = Array | Tensor | Sequence[Sequence[int]]
Record = Mapping[str, Any]

LOGIT = 20.0  # the histograms cover logits from -20 to 20; scores beyond are within 2e-9 of 0 or 1


# Metrics from a confusion matrix.


def accuracy(confusion: Matrix) -> Value:
    matrix = _square(confusion)
    return _ratio(np.trace(matrix), matrix.sum())


def recall(confusion: Matrix) -> list[Value]:
    """For each class, the share of its samples that are predicted as this class.

    >>> recall([[3, 1], [0, 0]])
    [0.75, None]
    """
    matrix = _square(confusion)
    return [_ratio(hit, total) for hit, total in zip(np.diag(matrix), matrix.sum(axis=1), strict=True)]


def precision(confusion: Matrix) -> list[Value]:
    """For each class, the share of its predictions that are right."""
    matrix = _square(confusion)
    return [_ratio(hit, total) for hit, total in zip(np.diag(matrix), matrix.sum(axis=0), strict=True)]


def f1(confusion: Matrix) -> list[Value]:
    """For each class, the harmonic mean of recall and precision: 0 if present but never found, None if absent."""
    matrix = _square(confusion)
    hits, true, predicted = np.diag(matrix), matrix.sum(axis=1), matrix.sum(axis=0)
    return [_ratio(2 * h, t + p) if t else None for h, t, p in zip(hits, true, predicted, strict=True)]


def balanced_accuracy(confusion: Matrix) -> Value:
    """The mean recall of the classes present."""
    return mean(recall(confusion))


def macro_f1(confusion: Matrix) -> Value:
    """The mean F1 of the classes present. Wrong predictions of an absent class show in the recall of the others."""
    return mean(f1(confusion))


def worst_class(confusion: Matrix) -> tuple[int | None, Value]:
    """The class with the lowest recall (the first of equals), and that recall."""
    present = [(value, index) for index, value in enumerate(recall(confusion)) if value is not None]
    value, index = min(present, default=(None, None))
    return index, value


def minority_recall(confusion: Matrix, classes: Iterable[int]) -> tuple[Value, Value]:
    """The worst and the mean recall among `classes`."""
    found = recall(confusion)
    for index in (classes := list(classes)):
        if not 0 <= index < len(found):
            raise ConfigError(f"minority class {index} does not exist; expected a number from 0 to {len(found) - 1}")
    values = [value for index in classes if (value := found[index]) is not None]
    return min(values, default=None), mean(values)


def thirds(train_counts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Head, middle and tail: the classes in falling order of training count, cut in three.

    Classes with equal counts stay in order of their numbers. Head and tail have a third of the classes each, rounded.
    When all counts are equal, all three are empty.

    >>> thirds([50, 400, 100, 200])
    ([1], [3, 2], [0])
    """
    counts = [int(count) for count in train_counts]
    if len(set(counts)) < 2:
        return [], [], []
    order = sorted(range(len(counts)), key=lambda index: -counts[index])
    third = round(len(order) / 3)
    return order[:third], order[third : len(order) - third], order[len(order) - third :]


def summary(
    confusion: Matrix, minority: Iterable[int] = (), train_counts: Sequence[int] | None = None
) -> dict[str, Any]:
    """All metrics of a confusion matrix in one flat dict, ready for JSON."""
    matrix = _square(confusion)
    found = recall(matrix)
    if train_counts is not None and len(train_counts) != len(found):
        raise DataError(f"train_counts has {len(train_counts)} entries; expected {len(found)}, one per class")
    head, middle, tail = thirds(train_counts if train_counts is not None else ())
    worst, worst_value = worst_class(matrix)
    minority_worst, minority_mean = minority_recall(matrix, minority)
    return {
        "accuracy": accuracy(matrix),
        "balanced_accuracy": balanced_accuracy(matrix),
        "macro_f1": macro_f1(matrix),
        "minority_accuracy": minority_worst,
        "minority_mean": minority_mean,
        "worst_class": worst,
        "worst_class_accuracy": worst_value,
        "head": mean(found[index] for index in head),
        "middle": mean(found[index] for index in middle),
        "tail": mean(found[index] for index in tail),
        "recall": found,
        "precision": precision(matrix),
        "counts": matrix.sum(axis=1).tolist(),
        "confusion": matrix.tolist(),
    }


# Metrics from scores. Histograms and reliability tables are sums over samples, so those of several clients add up.


def histograms(probabilities: Tensor, y: Tensor, bins: int = 2000, mask: Tensor | None = None) -> Tensor:
    """Histograms [classes, 2, bins] of each class's score: of samples of other classes [:, 0], and of its own [:, 1].

    Bins have equal width in the logit, and are therefore narrow near 0 and 1, where a trained model puts its scores.
    With 2,000 bins, two scores less than 0.02 apart in the logit may share a bin. Masked-out samples do not count.
    """
    classes = probabilities.shape[1]
    logits = torch.logit(probabilities.double()).nan_to_num(nan=-LOGIT, posinf=LOGIT, neginf=-LOGIT)
    index = ((logits + LOGIT) * (bins / (2 * LOGIT))).long().clamp(0, bins - 1)
    labels = torch.arange(classes, device=y.device)
    row = 2 * labels + (y[:, None] == labels)
    counted = (torch.ones_like(y) if mask is None else mask.long())[:, None].expand_as(index)
    empty = torch.zeros(classes * 2 * bins, dtype=torch.int64, device=y.device)
    counts = empty.scatter_add(0, (row * bins + index).flatten(), counted.flatten())
    return counts.view(classes, 2, bins)


def reliability(probabilities: Tensor, y: Tensor, bins: int = 15, mask: Tensor | None = None) -> Tensor:
    """Sums [bins, 3] over samples binned by confidence: their number, their confidence, and how many are right."""
    confidence, predicted = probabilities.double().nan_to_num(nan=0.0).max(dim=1)
    index = (confidence * bins).long().clamp(0, bins - 1)
    member = index[:, None] == torch.arange(bins, device=y.device)
    counted = member if mask is None else member & mask[:, None]
    columns = torch.stack([torch.ones_like(confidence), confidence, (predicted == y).double()], dim=1)
    return counted.double().T @ columns


def auroc(histogram: Tensor | Array) -> list[Value]:
    """For each class, the probability that a sample of the class scores above one of another class.

    A pair of samples in the same bin counts as half.
    """
    negative, positive = _sides(histogram)
    below = np.cumsum(negative, axis=1) - negative
    wins = (positive * (below + negative / 2)).sum(axis=1)
    return [_ratio(*pair) for pair in zip(wins, positive.sum(axis=1) * negative.sum(axis=1), strict=True)]


def auprc(histogram: Tensor | Array) -> list[Value]:
    """For each class, the expected average precision when the samples of a bin are ranked in random order.

    Let a bin have m samples, p of them positive, and the bins above it b samples, a of them positive. The j-th of the
    m samples is positive with probability p / m. If so, a + 1 + (j - 1) c of the b + j samples up to it are positive
    on average, with c = (p - 1) / (m - 1). In the sum over j, the terms 1 / (b + j) become a difference of digammas.
    """
    negative, positive = _sides(histogram)
    p = positive[:, ::-1]
    m = p + negative[:, ::-1]
    a, b = np.cumsum(p, axis=1) - p, np.cumsum(m, axis=1) - m
    c = np.maximum(p - 1, 0) / np.maximum(m - 1, 1)
    harmonic = _digamma(b + m + 1) - _digamma(b + 1)
    gained = (p / np.maximum(m, 1) * (c * m + (a + 1 - c - c * b) * harmonic)).sum(axis=1)
    wholes = positive.sum(axis=1) * (negative.sum(axis=1) > 0)
    return [_ratio(*pair) for pair in zip(gained, wholes, strict=True)]


def recall_at(histogram: Tensor | Array, false_positive_rate: float) -> list[Value]:
    """For each class, the recall at the threshold where the given share of other samples is mistaken for the class.

    Between two thresholds, the ROC curve is interpolated linearly.
    """
    negative, positive = _sides(histogram)
    values: list[Value] = []
    for false, true in zip(_at_or_above(negative), _at_or_above(positive), strict=True):
        if not (false[-1] and true[-1]):
            values.append(None)
            continue
        fpr, tpr = np.append(0, false / false[-1]), np.append(0, true / true[-1])
        before = int(np.searchsorted(fpr, false_positive_rate, side="right")) - 1
        after = min(before + 1, len(fpr) - 1)
        step = fpr[after] - fpr[before]
        along = (false_positive_rate - fpr[before]) / step if step else 0.0
        values.append(float(tpr[before] + along * (tpr[after] - tpr[before])))
    return values


def calibration_error(table: Tensor | Array) -> Value:
    """Expected calibration error: the mean gap between confidence and accuracy, with bins weighted by size."""
    count, confidence, correct = _numpy(table).astype(np.float64).T
    return _ratio(np.abs(confidence - correct).sum(), count.sum())


def scores(histogram: Tensor | Array, table: Tensor | Array | None = None) -> dict[str, Any]:
    """All metrics from scores in one dict, ready for JSON: the means over classes, and the values of each class."""
    by_class = {
        "auroc": auroc(histogram),
        "auprc": auprc(histogram),
        "recall_at_fpr_1": recall_at(histogram, 0.01),
        "recall_at_fpr_5": recall_at(histogram, 0.05),
    }
    return {
        **{name: mean(values) for name, values in by_class.items()},
        "calibration_error": None if table is None else calibration_error(table),
        **{f"{name}_by_class": values for name, values in by_class.items()},
    }


# Statistics over clients, rounds and seeds.


def mean(values: Iterable[Value]) -> Value:
    """The mean of the values that are neither None nor NaN."""
    known = _known(values)
    return math.fsum(known) / len(known) if known else None


def spread(values: Iterable[Value]) -> dict[str, Value]:
    """Statistics of a value over clients. The standard deviation divides by n, not by n - 1."""
    known = np.array(_known(values), dtype=np.float64)
    if not known.size:
        return dict.fromkeys(("mean", "std", "min", "p10", "median", "p90", "max")) | {"count": 0}
    low, p10, median, p90, high = np.percentile(known, [0, 10, 50, 90, 100]).tolist()
    return {
        "mean": float(known.mean()),
        "std": float(known.std()),
        "min": low,
        "p10": p10,
        "median": median,
        "p90": p90,
        "max": high,
        "count": known.size,
    }


def interval(values: Iterable[Value]) -> tuple[Value, Value]:
    """Mean, and half-width of its 95 % confidence interval over seeds (Student's t); None for a single seed.

    >>> average, half = interval([0.70, 0.72, 0.74])
    >>> f"{average:.2f} ± {half:.3f}"
    '0.72 ± 0.050'
    """
    known = _known(values)
    if len(known) < 2:
        return mean(known), None
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # imported here because it is slow to load

    deviation = float(np.std(known, ddof=1))
    return mean(known), float(stdtrit(len(known) - 1, 0.975)) * deviation / math.sqrt(len(known))


def best(records: Iterable[Record], key: str = "accuracy") -> Record | None:
    """The first record with the highest value of `key`, or None if no record has a value."""
    return max(_having(records, key), key=lambda record: float(record[key]), default=None)


def rounds_to(records: Iterable[Record], target: float, key: str = "accuracy") -> int | None:
    """The first round in which `key` reaches the target, or None.

    >>> rounds_to([{"round": 5, "accuracy": 0.4}, {"round": 10, "accuracy": 0.6}], 0.5)
    10
    """
    return next((int(r["round"]) for r in _having(records, key) if r[key] >= target), None)


def _having(records: Iterable[Record], key: str) -> list[Record]:
    return [record for record in records if _known([record.get(key)])]


def _known(values: Iterable[Value]) -> list[float]:
    return [float(value) for value in values if value is not None and not math.isnan(value)]


def _ratio(part: float, whole: float) -> Value:
    return float(part / whole) if whole else None


def _numpy(array: Any) -> Array:
    return array.detach().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)


def _square(confusion: Matrix) -> Array:
    matrix = _numpy(confusion)
    if matrix.size == 0:
        return np.zeros((0, 0), dtype=np.int64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise DataError(f"the confusion matrix has shape {matrix.shape}; expected one row and one column per class")
    return matrix.astype(np.int64)


def _sides(histogram: Tensor | Array) -> tuple[Array, Array]:
    counts = _numpy(histogram).astype(np.float64)  # the product of two counts may overflow 64-bit integers
    return counts[:, 0], counts[:, 1]


def _digamma(values: Array) -> Array:
    return torch.digamma(torch.from_numpy(values)).numpy()


def _at_or_above(counts: Array) -> Array:
    """For each bin, from the highest down, the number of samples in it or in a higher one."""
    return np.cumsum(counts[:, ::-1], axis=1)

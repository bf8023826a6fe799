"""Trees, settings, chains and questions in packets: they come back unchanged, or an error says why not."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch

import equipoise.methods
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.local import Local
from equipoise.core.questions import ClassCounts, KeptCounts, MeanLoss, Question
from equipoise.core.tree import Tree
from equipoise.deploy.packets import (
    _subclasses,
    pack,
    read_chain,
    read_local,
    read_question,
    unpack,
    write_local,
    write_question,
)
from equipoise.deploy.transport.wire import LIMIT, Packet, WireError, decode, encode
from equipoise.methods.active import Value
from equipoise.methods.climb import DualStep, KeptLoss
from equipoise.methods.shared.estimation import SquareLoss
from equipoise.methods.shift import Shares
from equipoise.runs.evaluation import Accuracies, Scores, _Fit
from tests.contract.methods import EVERY

TREES: Tree = {
    "params": {"w": torch.randn(2, 3, dtype=torch.float64), "b": torch.zeros(3)},
    "buffers": {},
    "numbers": {"n": torch.tensor(4), "seen": torch.tensor([True, False])},
}


def sent(trees: Tree) -> Packet:
    return decode(encode(pack("reply", {}, trees)))


def test_trees_come_back_with_their_empty_branches() -> None:
    back = unpack(sent(TREES), TREES, LIMIT)
    assert back.keys() == TREES.keys()
    assert back["buffers"] == {}
    for name, leaf in tree.flatten(TREES).items():
        assert torch.equal(tree.flatten(back)[name], leaf)


def changed(name: str, array: np.ndarray | None) -> Packet:
    packet = sent(TREES)
    arrays = {**packet.arrays, name: array} if array is not None else {**packet.arrays}
    if array is None:
        del arrays[name]
    return packet._replace(arrays=arrays)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("params/w", None, "lacks the array 'params/w'"),
        ("params/v", np.zeros(2), r"array 'params/v' that was not asked for; did you mean 'params/w'\?"),
        ("params/w", np.zeros((3, 2)), r"params/w is float64 \[3, 2\], expected float64 \[2, 3\]"),
        ("params/w", np.zeros((1, 2, 3)), r"params/w is float64 \[1, 2, 3\]"),
        ("params/w", np.zeros((2, 3), np.float32), r"params/w is float32 \[2, 3\], expected float64 \[2, 3\]"),
        ("numbers/n", np.array(4, np.int32), r"numbers/n is int32 \[\], expected int64 \[\]"),
        ("params/w", np.full((2, 3), np.nan), "params/w holds a number that is not finite"),
        ("params/b", np.array([0, np.inf, 0], np.float32), "params/b holds a number that is not finite"),
    ],
)
def test_a_packet_that_differs_from_the_expected_trees_is_refused(
    name: str, array: np.ndarray | None, sentence: str
) -> None:
    with pytest.raises(WireError, match=sentence):
        unpack(changed(name, array), TREES, LIMIT)


def test_a_packet_above_the_limit_is_refused() -> None:
    packet = sent(TREES)
    assert unpack(packet, TREES, packet.nbytes)
    with pytest.raises(WireError, match=rf"{packet.nbytes} bytes, expected at most {packet.nbytes - 1}"):
        unpack(packet, TREES, packet.nbytes - 1)


LOCALS = [
    Local(),
    Local(batch="full", clip=1.0, schedule="cosine", horizon=7),
    Local(optimiser="adam", betas=(0.5, 0.75), steps_per_epoch=3, weighting="uniform", prox=0.2),
]


@pytest.mark.parametrize("local", LOCALS, ids=["default", "full batch", "adam"])
def test_settings_of_local_training_come_back(local: Local) -> None:
    assert read_local(json.loads(json.dumps(write_local(local)))) == local


@pytest.mark.parametrize("settings", [{}, {"betas": [0.9, 0.99], "speed": 1}, {"betas": 3}], ids=str)
def test_settings_that_cannot_be_read_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="settings of local training cannot be read"):
        read_local(settings)
    with pytest.raises(ConfigError, match=r"local\.lr = -1"):
        read_local({**write_local(Local()), "lr": -1})


@pytest.mark.parametrize("name", EVERY)
def test_every_chain_comes_back_from_its_text(name: str) -> None:
    assert read_chain(str(EVERY[name])) == EVERY[name]
    assert read_chain(str(SquareLoss())) == Chain(SquareLoss())  # the loss of FedRE before the first round


QUESTIONS: list[Question] = [
    ClassCounts(5),
    KeptCounts(3),
    Shares(3),
    MeanLoss(),
    Scores(4, full=False),
    Value(),
    KeptLoss(sized=True, batch=8),
    KeptLoss(sized=False, steps_per_epoch=2),
    DualStep(sized=True, eta=0.1, epsilon=0.01, cap=math.inf, slack=None, slack_eta=0.0),
    DualStep(sized=False, eta=2.0, epsilon=0.0, cap=5.0, slack=0.5, slack_eta=0.25),
    _Fit(),
    Accuracies(),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=repr)
def test_questions_come_back(question: Question) -> None:
    back = read_question(json.loads(json.dumps(write_question(question))))
    assert type(back) is type(question)
    assert back == question


def test_every_question_of_the_package_is_in_the_list() -> None:
    for module in pkgutil.iter_modules(equipoise.methods.__path__):
        importlib.import_module(f"equipoise.methods.{module.name}")
    own = {kind for kind in _subclasses(Question) if kind.__module__.startswith("equipoise.")}
    assert own == {type(question) for question in QUESTIONS}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "ClassCount", "classes": 3}, r"question 'ClassCount' is unknown here"),
        ({"kind": "os:system"}, "question 'os:system' is unknown here"),
        ({"kind": ["ClassCounts"]}, "is unknown here"),
        ({}, "question None is unknown here"),
        ({"kind": "equipoise.core.questions:ClassCounts"}, "ClassCounts cannot be read"),
        ({"kind": "equipoise.core.questions:ClassCounts", "classes": 3, "more": 1}, "ClassCounts cannot be read"),
    ],
)
def test_an_unknown_question_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        read_question(settings)

"""Evaluation of a model: on test samples, and by each client on samples of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation, Split
from equipoise.core.method import Method
from equipoise.core.network import Network
from equipoise.core.round import one_round, start
from equipoise.core.tree import Tree
from equipoise.data.holdout import holdout
from equipoise.engines import Serial, Simulator
from equipoise.runs.evaluation import Accuracies, across_clients, confusion_matrix, evaluate
from equipoise.testing.in_process import site_engine, without_samples
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
    spread = across_clients(engine, state.params, state.buffers, Chain())
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
    assert across_clients(engine, state.params, state.buffers, Chain(), most=2)["client_loss"]["count"] == 2
    assert spread["client_samples"] == "training"


# -- as each client uses the model itself
@dataclass(frozen=True)
class Bias(Method):
    """Every client keeps a bias of its own, the share of each of its classes, and adds it to the logits."""

    factor: float = 100.0

    name = "bias"
    needs_data = True

    def remember(self, params: Tree, classes: int) -> Tree:
        return {"bias": torch.zeros(classes, dtype=next(tree.leaves(params)).dtype)}

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        assert data is not None
        bias = env.memory["bias"]
        own = (data.y[:, None] == torch.arange(len(bias))) & data.mask[:, None]
        return {}, {"bias": own.sum(0).to(bias.dtype) / env.n}

    def personal(self, logits: Tensor, env: Env) -> Tensor:
        return logits + self.factor * env.memory["bias"]


@dataclass(frozen=True)
class Head(Method):
    """The logits of a client are those of the model, made anew from what its last layer reads."""

    name = "head"
    needs_features = True

    def personal(self, logits: Tensor, env: Env) -> Tensor:
        assert env.features is not None
        assert env.x is not None
        again, _ = env.forward(env.params)
        layer = env.network.head
        from_features = env.features @ env.params[f"{layer}.weight"].T + env.params[f"{layer}.bias"]
        return from_features + again - logits


def holding(fed: Federation, share: float) -> Federation:
    """The same federation, whose clients hold out a share of their samples, as sites do."""
    kept, held = [], []
    for client in range(fed.clients):
        mine = client_rows(fed, client)
        y = fed.y[mine].numpy()
        chosen = torch.from_numpy(holdout(y, share, fed.seed, 0 * y))
        kept.append(mine[~chosen])
        held.append(mine[chosen])
    offsets, held_offsets = (torch.tensor([0, *map(len, parts)]).cumsum(0) for parts in (kept, held))
    return replace(
        fed, offsets=offsets, indices=torch.cat(kept), held_offsets=held_offsets, held_indices=torch.cat(held)
    )


def trained(fed: Federation, chain: Chain, engine: Simulator) -> dict[str, Any]:
    """The spread over clients after two rounds; what methods keep must stay as it is."""
    state = start(fed, chain, engine)
    for _ in range(2):
        state, _ = one_round(state, fed, chain, engine)
    before = engine.memory.save()
    spread = across_clients(engine, state.params, state.buffers, chain)
    after = engine.memory.save()
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(after), strict=True))
    return spread


def test_clients_are_tried_on_what_they_hold_out_with_their_own_memory() -> None:
    fed = holding(federation(sizes=(9, 0, 14, 1, 6)), 0.4)
    assert fed.tried.tolist() == [0, 2, 4]
    serial, stacked = (trained(fed, Chain(Bias()), make(fed, precision="float64")) for make in (Serial, Stacked))
    assert serial["client_samples"] == stacked["client_samples"] == "held out"
    assert stacked["client_accuracy"] == serial["client_accuracy"]
    assert stacked["client_loss"]["mean"] == pytest.approx(serial["client_loss"]["mean"], rel=1e-10)
    # So strong a bias leaves each client its most frequent class.
    accuracies = []
    assert fed.held_offsets is not None
    assert fed.held_indices is not None
    for client in (0, 2, 4):
        favourite = int(torch.bincount(fed.y[client_rows(fed, client)]).argmax())
        held = fed.held_indices[fed.held_offsets[client] : fed.held_offsets[client + 1]]
        accuracies.append((fed.y[held] == favourite).double().mean().item())
    strong = trained(fed, Chain(Bias(factor=1e6)), Stacked(fed, precision="float64"))
    assert strong["client_accuracy"]["mean"] == pytest.approx(sum(accuracies) / 3)
    assert strong["client_accuracy"]["count"] == 3


@pytest.mark.parametrize("make", [Stacked, Serial])
def test_a_personal_head_reads_features(make: type[Simulator]) -> None:
    fed = holding(image_federation(dropout_cnn()), 0.3)
    plain, again = (trained(fed, chain, make(fed, precision="float64")) for chain in (Chain(), Chain(Head())))
    assert again["client_loss"]["mean"] == pytest.approx(plain["client_loss"]["mean"], rel=1e-10)
    assert again["client_accuracy"] == plain["client_accuracy"]


def test_clients_that_hold_out_nothing_are_skipped() -> None:
    fed = holding(federation(sizes=(9, 1, 14)), 0.4)
    engine = Stacked(fed)
    engine.open(Chain(), engine.place(fed.network.params))
    question = Accuracies()
    model = engine.place(fed.network.params), {}
    rows = engine.trial(question, *model, Chain(), clients=torch.tensor([2, 1, 0]), rows=True)
    total = engine.trial(question, *model, Chain())
    assert int(total["clients"]) == 2 == len(rows["accuracy"])
    assert float(rows["accuracy"].sum()) == pytest.approx(float(total["accuracy"]))
    assert engine.trial(question, *model, Chain(), clients=torch.tensor([1]), rows=True) == {}


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_sites_agree_with_a_simulation(share: float, tmp_path: Path) -> None:
    fed, chain = federation(sizes=(9, 14, 1, 6)), Chain(Bias(factor=3.0))
    held = holding(fed, share) if share else fed
    want = trained(held, chain, Stacked(held, precision="float64"))
    remote = site_engine(fed, chain, tmp_path, "tests.federations:linear5", held_out=share)
    view = without_samples(fed)
    got = trained(view, chain, remote)
    assert got["client_samples"] == want["client_samples"] == ("held out" if share else "training")
    assert set(got["client_accuracy"]) == {"mean", "std", "count"}
    for name, value in got["client_accuracy"].items():
        assert value == pytest.approx(want["client_accuracy"][name])
    with pytest.raises(ConfigError, match="rows = True: a site tries the model on its own samples for a sum"):
        remote.trial(Accuracies(), {}, {}, chain, rows=True)


def test_a_sum_of_one_site_says_nothing(tmp_path: Path) -> None:
    fed = federation(sizes=(9, 1, 1))
    remote = site_engine(fed, Chain(), tmp_path, "tests.federations:linear5", held_out=0.4)
    assert trained(without_samples(fed), Chain(), remote)["client_accuracy"] == {
        "mean": None,
        "std": None,
        "count": 1,
    }

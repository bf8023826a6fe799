"""Questions: answered by totals over all clients' data, or in rows, in the order asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.federation import Federation
from equipoise.core.questions import ClassCounts, MeanLoss, Question, cross_entropy
from equipoise.core.round import start
from equipoise.core.tree import Tree
from equipoise.core.turn import State
from equipoise.engines import Serial
from tests.federations import SIZES, federation, image_federation, norm_cnn
from tests.reference.loop import client_rows
from tests.toys import Visits

Make = Callable[[Federation], Engine]
on_every_engine = pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda fed: Stacked(fed, precision="float64"), id="stacked"),
        pytest.param(lambda fed: Serial(fed, precision="float64"), id="serial"),
    ],
)


def ask(fed: Federation, question: Question, engine: Engine, **options: Any) -> Tree:
    state = start(fed, Chain(), engine)
    with torch.no_grad():
        return engine.ask(question, state.params, state.buffers, **options)


def counts(fed: Federation, client: int) -> Tensor:
    return torch.bincount(fed.y[client_rows(fed, client)], minlength=len(fed.classes))


def test_cross_entropy_is_torchs() -> None:
    outputs, y = torch.randn(20, 5, dtype=torch.float64), torch.arange(20) % 5
    torch.testing.assert_close(cross_entropy(outputs, y), nn.functional.cross_entropy(outputs, y, reduction="none"))


@on_every_engine
def test_class_counts(make: Make) -> None:
    fed = federation()
    assert torch.equal(ask(fed, ClassCounts(3), make(fed))["counts"], fed.class_counts)


@on_every_engine
def test_class_counts_of_a_class_nobody_has(make: Make) -> None:
    fed = federation()
    assert ask(fed, ClassCounts(5), make(fed))["counts"].tolist()[3:] == [0, 0]


@on_every_engine
@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4, 5], [5, 2, 0], [3]])
def test_rows_come_in_the_order_asked(make: Make, clients: list[int]) -> None:
    fed = federation()
    rows = ask(fed, ClassCounts(3), make(fed), clients=torch.tensor(clients), rows=True)["counts"]
    assert torch.equal(rows, torch.stack([counts(fed, client) for client in clients]))


@on_every_engine
def test_rows_come_in_the_order_asked_over_many_chunks(make: Make) -> None:
    fed = federation(sizes=(3000, 1, 5000, 40, 4096, 7000, 2))
    rows = ask(fed, ClassCounts(3), make(fed), rows=True)["counts"]
    assert torch.equal(rows, torch.stack([counts(fed, client) for client in range(7)]))


@on_every_engine
def test_mean_loss_is_the_sum_of_each_clients_mean(make: Make) -> None:
    fed = federation()
    engine = make(fed)
    losses = torch.stack(
        [
            nn.functional.cross_entropy(
                engine.outputs(engine.place(fed.network.params), {}, fed.x[rows]), fed.y[rows]
            )
            for rows in (client_rows(fed, client) for client in range(6))
        ]
    )
    torch.testing.assert_close(ask(fed, MeanLoss(), engine)["loss"], losses.sum(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ask(fed, MeanLoss(), engine, rows=True)["loss"], losses, rtol=1e-12, atol=1e-12)


@on_every_engine
def test_questions_are_answered_in_evaluation_mode(make: Make) -> None:
    torch.manual_seed(0)
    module = norm_cnn()
    fed = image_federation(module)
    module.double().eval()
    expected = sum(nn.functional.cross_entropy(module(fed.x[r].double()), fed.y[r])
                   for r in (client_rows(fed, client) for client in range(6)))  # fmt: skip
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(ask(fed, MeanLoss(), make(fed))["loss"], expected.detach(), rtol=1e-12, atol=1e-12)


@on_every_engine
def test_empty_clients_are_not_asked(make: Make) -> None:
    fed = federation(sizes=(3, 0, 5))
    assert ask(fed, MeanLoss(), make(fed), rows=True)["loss"].shape == (2,)
    assert ask(fed, MeanLoss(), make(fed))["loss"].isfinite()


@dataclass(frozen=True)
class Remember(Question):
    """Keeps a number that the server sends, and answers with what was kept before."""

    needs_data = False

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        raise AssertionError("this question looks at no data")

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {"kept": memory["visits"]}, {"visits": memory["visits"] + msg["add"]}


@on_every_engine
def test_a_question_reads_and_writes_the_memory_of_its_method(make: Make) -> None:
    fed = federation()
    engine = make(fed)
    state: State = start(fed, Chain(Visits()), engine)
    for clients, kept in (([0, 3], 0), ([3, 4], 5), ([0, 1, 3, 4], 20)):
        answer = engine.ask(
            Remember(), state.params, {}, owner="visits", clients=torch.tensor(clients), msg={"add": torch.tensor(5)}
        )
        assert answer["kept"].item() == kept
    saved = engine.memory.save()["visits"]
    assert dict(zip(saved["clients"].tolist(), saved["rows"]["visits"].tolist(), strict=True)) == {
        0: 10,
        1: 5,
        3: 15,
        4: 10,
    }


def test_measures_see_no_outputs_when_they_need_no_model() -> None:
    @dataclass(frozen=True)
    class Blind(Question):
        needs_model = False

        def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
            return {"n": mask.sum()}

    fed = federation()
    engine = Serial(fed)

    def refuse(*_: object) -> Tensor:
        raise AssertionError("the model was run")

    engine.outputs = refuse  # type: ignore[assignment]
    assert ask(fed, Blind(), engine)["n"].item() == sum(SIZES)

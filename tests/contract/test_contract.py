"""What every method must do, alone and in chains, on every engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equipoise import checkpoint, expression, tree
from equipoise.engines import Engine, Serial, Stacked, Sums
from equipoise.federation import Federation
from equipoise.method import Chain, FedAvg, Method
from equipoise.methods import METHODS
from equipoise.models import build
from equipoise.round import one_round, start
from equipoise.server import State, Turn
from equipoise.tree import Tree
from tests.contract.methods import ALONE, CHAINED, EVERY, NEUTRAL
from tests.federations import dropout_cnn, federation, image_federation, norm_cnn

COMPILED = [Chain(method) for method in (*ALONE, *CHAINED[::6])]  # compiling takes seconds: not every chain

every_method = pytest.mark.parametrize("chain", EVERY.values(), ids=EVERY.keys())


def rounds(fed: Federation, chain: Chain, engine: Engine, count: int, state: State | None = None) -> State:
    state = state or start(fed, chain, engine)
    for _ in range(count):
        state, _ = one_round(state, fed, chain, engine)
    return state


def everything(state: State, engine: Engine) -> Tree:
    """All that a run remembers, at the server and at the clients."""
    return {
        "params": state.params,
        "buffers": state.buffers,
        "slots": state.slots,
        "memory": engine.memory.save(),
    }


def close(a: Tree, b: Tree, tolerance: float) -> None:
    flat_a, flat_b = tree.flatten(a), tree.flatten(b)
    assert flat_a.keys() == flat_b.keys()
    for name, value in flat_a.items():
        if tolerance == 0:
            assert torch.equal(value, flat_b[name]), name
        else:
            torch.testing.assert_close(
                value, flat_b[name], rtol=tolerance, atol=tolerance, msg=lambda m, at=name: f"{at}: {m}"
            )


def stacked(fed: Federation, **options: Any) -> Stacked:
    return Stacked(fed, precision="float64", **options)


@every_method
def test_stacked_equals_serial(chain: Chain) -> None:
    fed = federation()
    one, other = stacked(fed, width=3), Serial(fed, precision="float64")
    close(everything(rounds(fed, chain, one, 3), one), everything(rounds(fed, chain, other, 3), other), 1e-10)


@pytest.mark.parametrize("network", [norm_cnn, dropout_cnn])
@every_method
def test_stacked_equals_serial_with_buffers_and_dropout(chain: Chain, network: Callable[[], nn.Module]) -> None:
    torch.manual_seed(4)
    fed = image_federation(network())
    one, other = stacked(fed, width=4), Serial(fed, precision="float64")
    close(everything(rounds(fed, chain, one, 2), one), everything(rounds(fed, chain, other, 2), other), 1e-9)


@pytest.mark.parametrize("chain", [Chain(), EVERY["scaffold"]], ids=["fedavg", "scaffold"])
def test_stacked_equals_serial_on_resnet18(chain: Chain) -> None:
    torch.manual_seed(5)
    fed = federation(build("resnet18", (3, 16, 16), 3, width=8), sizes=(5, 3, 4), shape=(3, 16, 16), cohort=0)
    one, other = stacked(fed), Serial(fed, precision="float64")
    close(everything(rounds(fed, chain, one, 1), one), everything(rounds(fed, chain, other, 1), other), 1e-10)


def save_and_load(folder: Path, state: State, engine: Engine) -> tuple[State, Tree]:
    checkpoint.save(folder, everything(state, engine), {"round": state.round})
    trees, meta = checkpoint.load(folder)
    return State(meta["round"], trees["params"], trees["buffers"], trees["slots"]), trees["memory"]


def resumed(fed: Federation, chain: Chain, make: Callable[[], Engine], folder: Path) -> None:
    whole = make()
    want = everything(rounds(fed, chain, whole, 4), whole)
    first = make()
    half, memory = save_and_load(folder, rounds(fed, chain, first, 2), first)
    second = make()
    start(fed, chain, second)
    second.memory.load(memory)
    close(everything(rounds(fed, chain, second, 2, half), second), want, 0)


@every_method
def test_resume_is_bitwise(chain: Chain, tmp_path: Path) -> None:
    fed = federation()
    resumed(fed, chain, lambda: Stacked(fed, width=4), tmp_path)


@pytest.mark.parametrize("chain", COMPILED, ids=str)
def test_compiled_equals_eager_and_resumes_bitwise(chain: Chain, tmp_path: Path) -> None:
    fed = federation(sizes=(8, 8, 8, 8), cohort=2)  # one shape, since each shape takes seconds to compile
    torch.compiler.reset()
    resumed(fed, chain, lambda: stacked(fed, compile=True), tmp_path)
    one, other = stacked(fed, compile=True), stacked(fed)
    close(everything(rounds(fed, chain, one, 2), one), everything(rounds(fed, chain, other, 2), other), 1e-10)


def test_a_ragged_cohort_compiles() -> None:
    fed = federation(cohort=0)
    torch.compiler.reset()
    one, other = stacked(fed, compile=True), stacked(fed)
    close(
        everything(rounds(fed, Chain(), one, 2), one),
        everything(rounds(fed, Chain(), other, 2), other),
        1e-10,
    )


@pytest.mark.parametrize("chain", [chain for chain in EVERY.values() if chain not in COMPILED], ids=str)
def test_each_part_of_a_visit_is_one_graph(chain: Chain) -> None:
    fed = federation(sizes=(8, 8, 8, 8), cohort=2)  # one shape, as above
    torch.compiler.reset()
    engine = stacked(fed, compile="eager")
    engine.compile_around = True
    rounds(fed, chain, engine, 1)


def train(fed: Federation, chain: Chain, plan: torch.Tensor) -> tuple[Sums, Tree]:
    engine = stacked(fed, width=3)
    state = start(fed, chain, engine)
    turn = Turn(fed, engine, state, state.params, state.buffers)
    with torch.no_grad():
        sums = engine.train(state, plan, chain, chain.local(fed.local), turn)
    return sums, engine.memory.save()


@every_method
def test_the_order_of_the_cohort_does_not_matter(chain: Chain) -> None:
    fed = federation()
    one, memory = train(fed, chain, torch.tensor([[0, 1, 3, 4]]))
    other, same = train(fed, chain, torch.tensor([[4, 0, 3, 1]]))
    close(one.delta, other.delta, 1e-12)
    close(one.uploads, other.uploads, 1e-12)
    close(memory, same, 1e-12)


@every_method
def test_an_empty_lane_changes_nothing(chain: Chain) -> None:
    fed = federation()
    one, memory = train(fed, chain, torch.tensor([[0, 1, 3]]))
    other, same = train(fed, chain, torch.tensor([[0, -1, 1, 3, -1]]))
    close(one.delta, other.delta, 0)
    close(memory, same, 0)
    assert one.clients == other.clients


@every_method
def test_a_round_without_clients_leaves_the_model(chain: Chain) -> None:
    fed = federation()
    nobody, memory = train(fed, chain, torch.full((1, 2), -1))
    before = stacked(fed)
    start(fed, chain, before)
    assert nobody.clients == 0
    close(memory, before.memory.save(), 0)  # what clients keep from before the first round
    assert all(bool((leaf == 0).all()) for leaf in tree.leaves(nobody.delta))


@every_method
def test_trees_keep_their_shape(chain: Chain) -> None:
    fed = federation()
    engine = stacked(fed)
    state = start(fed, chain, engine)
    shapes = [{k: v.shape for k, v in tree.flatten(state.slots).items()}]
    for _ in range(2):
        state, sums = one_round(state, fed, chain, engine)
        shapes.append({k: v.shape for k, v in tree.flatten(state.slots).items()})
        assert all(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(sums.uploads))
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize("method", ALONE, ids=str)
def test_a_method_is_its_configuration(method: Method) -> None:
    assert eval(repr(method), {type(method).__name__: type(method)}) == method
    assert expression.parse(str(method), METHODS) == [method]


@every_method
def test_a_chain_is_its_expression(chain: Chain) -> None:
    assert Chain(*expression.parse(str(chain), METHODS)) == chain


@pytest.mark.parametrize(("method", "tolerance"), NEUTRAL, ids=lambda value: str(value))
def test_neutral_settings_are_fedavg(method: Method, tolerance: float) -> None:
    fed = federation(sizes=(8, 8, 8, 8, 8, 8))
    one, other = stacked(fed), stacked(fed)
    left, right = rounds(fed, Chain(method), one, 3), rounds(fed, Chain(FedAvg()), other, 3)
    close(left.params, right.params, tolerance)


def test_every_exported_method_is_under_contract() -> None:
    assert {m.name for m in ALONE} == set(METHODS)

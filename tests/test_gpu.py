"""The same on a GPU: the same draws, the same results, the same bits after a resume, and twenty times the speed."""

from __future__ import annotations

import os

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # cuBLAS repeats itself only with this, set before its start

import copy
import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from equipoise import random, tree
from equipoise.engines import Engine, Serial, Stacked
from equipoise.errors import TrainingError
from equipoise.federation import Federation
from equipoise.local import Local
from equipoise.method import Chain, FedAvg, Method
from equipoise.methods import FedAdam, FedNova, FedProx, Scaffold
from equipoise.questions import ClassCounts, MeanLoss
from equipoise.round import one_round, start
from equipoise.server import State
from equipoise.tree import Tree
from tests.federations import dropout_cnn, federation, image_federation, norm_cnn
from tests.toys import Doubles, Even, Factor, Lanes, Looker, Square, StartLoss, Visits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def rounds(fed: Federation, method: Method, engine: Engine, count: int, state: State | None = None) -> State:
    chain = Chain(method)
    state = state or start(fed, chain, engine)
    for _ in range(count):
        state, _ = one_round(state, fed, chain, engine)
    return state


def everything(state: State, engine: Engine) -> dict[str, torch.Tensor]:
    whole: Tree = {
        "params": state.params,
        "buffers": state.buffers,
        "slots": state.slots,
        "memory": engine.memory.save(),
    }
    return {name: leaf.cpu() for name, leaf in tree.flatten(whole).items()}


def agree(fed: Federation, method: Method, count: int, tolerance: float, **options: int) -> None:
    ends = []
    for device in ("cuda", "cpu"):
        engine = Stacked(fed, device=device, precision="float64", **options)
        ends.append(everything(rounds(fed, method, engine, count), engine))
    one, other = ends
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=tolerance, atol=tolerance, msg=lambda m, at=name: f"{at}: {m}"
        )


def test_draws_are_the_same_bits() -> None:
    keys = random.bits(3, torch.arange(50))
    there = keys.cuda()
    assert torch.equal(random.draws(there, 1000).cpu(), random.draws(keys, 1000))
    assert torch.equal(random.order(there, 1000).cpu(), random.order(keys, 1000))
    assert torch.equal(random.chance(there, 1000, 0.3).cpu(), random.chance(keys, 1000, 0.3))
    assert torch.equal(random.fold(there, 7).cpu(), random.fold(keys, 7))


CHAINS: list[Method] = [
    FedAvg(),
    Scaffold(),
    FedNova(),
    Scaffold() + FedProx(mu=0.1) + FedAdam(lr=0.05),
    Lanes(((0, 3, -1), (1, 3, 5), (0, -1, 4))) + Factor(),
    StartLoss() + Visits() + Looker(),
    Doubles() + Square() + Even(),
]


@pytest.mark.parametrize("cohort", [0, 4], ids=["everybody, recorded", "another cohort each round"])
@pytest.mark.parametrize("method", CHAINS, ids=str)
def test_cuda_equals_cpu(method: Method, cohort: int) -> None:
    agree(federation(cohort=cohort), method, 5, 1e-10)


@pytest.mark.parametrize("method", [FedAvg(), Scaffold()], ids=str)
@pytest.mark.parametrize("network", [norm_cnn, dropout_cnn])
def test_cuda_equals_cpu_with_buffers_and_dropout(network: Callable[[], nn.Module], method: Method) -> None:
    torch.manual_seed(0)
    agree(image_federation(network(), cohort=0), method, 4, 1e-9)


def test_cuda_equals_cpu_in_narrow_blocks() -> None:
    agree(federation(cohort=0), Scaffold(), 4, 1e-10, width=2)


def test_the_serial_engine_runs_on_cuda() -> None:
    fed = federation()
    one = rounds(fed, Scaffold(), Serial(fed, device="cuda", precision="float64"), 2).params
    other = rounds(fed, Scaffold(), Stacked(fed, device="cuda", precision="float64"), 2).params
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-10, atol=1e-10)


def test_questions_on_cuda() -> None:
    fed = federation(sizes=(3000, 1, 50, 700))
    answers = []
    for device in ("cuda", "cpu"):
        engine = Stacked(fed, device=device, precision="float64")
        state = start(fed, Chain(), engine)
        counts = engine.ask(ClassCounts(3), state.params, state.buffers, rows=True)["counts"]
        losses = engine.ask(MeanLoss(), state.params, state.buffers, rows=True)["loss"]
        answers.append((counts.cpu(), losses.cpu()))
    assert torch.equal(answers[0][0], answers[1][0])
    torch.testing.assert_close(answers[0][1], answers[1][1], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("cohort", [0, 4])
@pytest.mark.parametrize("method", [FedAvg(), Scaffold() + FedAdam(lr=0.05)], ids=str)
def test_resume_is_bitwise(method: Method, cohort: int, precision: str) -> None:
    torch.manual_seed(0)
    fed = image_federation(dropout_cnn(), cohort=cohort)

    def engine() -> Stacked:
        return Stacked(fed, device="cuda", precision=precision)

    whole = engine()
    want = everything(rounds(fed, method, whole, 6), whole)
    first = engine()
    half = rounds(fed, method, first, 3)
    second = engine()
    start(fed, Chain(method), second)
    second.memory.load(first.memory.save())
    got = everything(rounds(fed, method, second, 3, half), second)
    assert all(torch.equal(got[name], want[name]) for name in want)


def mlp(features: int = 784, classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, classes)
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_fast_arithmetic_is_used_where_asked_and_is_near(precision: str) -> None:
    torch.manual_seed(0)
    fed = federation(mlp(), sizes=(64,) * 8, cohort=0, shape=(784,), classes=10, local=Local(lr=0.05, batch=32))
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    exact, plain, fast = (
        rounds(fed, FedAvg(), Stacked(fed, device="cuda", precision=p), 3).params
        for p in ("float64", "float32", precision)
    )
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before

    def error(params: Tree) -> float:
        return max(float((params[name] - value).abs().max()) for name, value in exact.items())

    moved = max(float((value.cpu() - fed.network.params[name]).abs().max()) for name, value in exact.items())
    assert error(plain) < 1e-2 * moved
    assert error(plain) < error(fast) < 0.3 * moved


def test_a_training_that_turns_nan_names_its_client() -> None:
    fed = federation(nn.Linear(5, 3), cohort=0)
    fed.x[fed.indices[fed.offsets[3]]] = torch.inf
    engine = Stacked(fed, device="cuda")
    rounds(fed, FedAvg(), engine, 3)  # looking at once would mean to wait for the device in every round
    with pytest.raises(TrainingError, match="round 1: the training of client 3 turned into not-a-number"):
        engine.settle()


def plain_round(fed: Federation, module: nn.Module, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FedAvg as one would write it by hand: all data on the GPU, one client after another."""
    x, y, indices = fed.x.cuda(), fed.y.cuda(), fed.indices.cuda()
    mean = {name: torch.zeros_like(value) for name, value in params.items()}
    for client in range(fed.clients):
        rows = indices[int(fed.offsets[client]) : int(fed.offsets[client + 1])]
        module.load_state_dict(params)
        optimiser = torch.optim.SGD(module.parameters(), lr=fed.local.lr)
        for batch in rows[torch.randperm(len(rows), device="cuda")].split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
            optimiser.step()
        for name, p in module.named_parameters():
            mean[name] += p.detach() / fed.clients
    return mean


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def test_stacked_is_twenty_times_faster_than_a_loop_over_clients() -> None:
    torch.manual_seed(0)
    module = mlp()
    fed = federation(
        module, sizes=(600,) * 100, cohort=0, shape=(784,), classes=10, local=Local(lr=0.05, batch=32), auxiliary=0
    )
    plain = copy.deepcopy(module).cuda()
    params = {name: p.detach().clone() for name, p in plain.named_parameters()}
    seconds(lambda: plain_round(fed, plain, params))
    loop = min(seconds(lambda: plain_round(fed, plain, params)) for _ in range(2))
    engine, chain = Stacked(fed, device="cuda"), Chain()
    state = rounds(fed, FedAvg(), engine, 4)
    stacked = statistics.median(seconds(lambda: one_round(state, fed, chain, engine)) for _ in range(7))
    print(f"loop {1000 * loop:.1f} ms, stacked {1000 * stacked:.1f} ms, {loop / stacked:.0f} times faster")
    assert loop / stacked >= 20

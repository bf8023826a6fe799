"""On a GPU: the same draws and results as on a CPU, the same bits after a resume, and twenty times the speed of a
loop over clients."""

from __future__ import annotations

import os

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # cuBLAS gives the same bits again only with this setting, made before it starts

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from equipoise import Stacked, models
from equipoise.core import random, tree
from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.errors import TrainingError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.network import Network
from equipoise.core.questions import ClassCounts, MeanLoss
from equipoise.core.round import one_round, start
from equipoise.core.tree import Tree
from equipoise.core.turn import State
from equipoise.engines import Serial
from equipoise.fast import schedule
from equipoise.fast.graphs import Graphs
from equipoise.fast.together import Seat, side_by_side
from equipoise.methods import FedAdam, FedNova, FedProx, Scaffold
from tests.fast.test_graphs import UNEVEN, WAYS, kinds, recorded_tracks
from tests.fast.test_schedule import RAGGED
from tests.federations import dropout_cnn, federation, image_federation, linear5, norm_cnn
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


def agree(
    fed: Federation, method: Method, count: int, tolerance: float, compile: bool = False, width: int | None = None
) -> Stacked:
    """Check that a GPU and a CPU give the same, and return the engine of the GPU."""
    there = Stacked(fed, device="cuda", precision="float64", compile=compile, width=width)
    here = Stacked(fed, precision="float64", width=width)
    one, other = (everything(rounds(fed, method, engine, count), engine) for engine in (there, here))
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=tolerance, atol=tolerance, msg=lambda m, at=name: f"{at}: {m}"
        )
    return there


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


@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
def test_cuda_equals_cpu_with_images_moved(compile: bool) -> None:
    torch.manual_seed(0)
    fed = image_federation(norm_cnn(), cohort=0)
    fed = replace(fed, local=replace(fed.local, augment="flip_crop"))
    agree(fed, FedAvg(), 3, 1e-9, compile=compile)


def test_cuda_equals_cpu_in_narrow_blocks() -> None:
    agree(federation(cohort=0), Scaffold(), 4, 1e-10, width=2)


@pytest.fixture
def gpu_with_latency_clients(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes engines take the GPU for one that trains so many clients in the time of one."""

    def given(number: int) -> None:
        monkeypatch.setattr(
            Stacked, "_latency_clients", lambda engine, local: number if engine.device.type == "cuda" else 0
        )
        monkeypatch.setattr(schedule, "SMALLEST_TRACK", 2)  # so that small tracks shrink, too
        monkeypatch.setattr(Graphs, "forget", lambda *_: None)  # so that tests see all recordings

    return given


@pytest.mark.parametrize(("cohort", "latency_clients", "tracks"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("method", [FedAvg(), Scaffold(), CHAINS[5]], ids=str)
def test_stacks_that_shrink_agree_with_the_cpu(
    method: Method,
    cohort: int,
    latency_clients: int,
    tracks: set[tuple[int, ...]],
    gpu_with_latency_clients: Callable[[int], None],
) -> None:
    gpu_with_latency_clients(latency_clients)
    fed = federation(sizes=UNEVEN, cohort=cohort, local=Local(lr=0.05, batch=1))
    assert recorded_tracks(agree(fed, method, 5, 1e-10)) >= tracks


def test_compiled_stacks_that_shrink_agree_with_the_cpu(gpu_with_latency_clients: Callable[[int], None]) -> None:
    gpu_with_latency_clients(3)
    fed = federation(sizes=UNEVEN, cohort=0, local=Local(lr=0.05, batch=1))
    assert (0, 4) in recorded_tracks(agree(fed, Scaffold(), 4, 1e-10, compile=True))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_tracks_side_by_side_give_the_same_bits_again(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would not if one track wrote to memory that the other reads."""
    monkeypatch.setattr(Graphs, "forget", lambda *_: None)
    torch.manual_seed(0)
    fed = federation(
        mlp(), sizes=tuple(16 * steps for steps in RAGGED), cohort=0, shape=(784,), classes=10,
        local=Local(lr=0.05, batch=16),
    )  # fmt: skip
    engines = [Stacked(fed, device="cuda", precision=precision) for _ in range(2)]
    one, other = (everything(rounds(fed, FedAvg(), engine, 6), engine) for engine in engines)
    assert (0, 12) in recorded_tracks(engines[0])
    assert "visit" in kinds(engines[0])
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize(("name", "shape"), [("astraea_cnn", (1, 28, 28)), ("pfl_cnn", (3, 32, 32))])
def test_compiled_networks_train_as_on_the_serial_engine(name: str, shape: tuple[int, ...], precision: str) -> None:
    """The serial engine uses float32, no compiler and none of our kernels. Sizes are odd, since compilers may get
    those wrong."""
    torch.manual_seed(0)
    network = models.build(name, shape, 10)
    local = Local(lr=0.02, batch=10)
    fed = federation(network, sizes=(24, 19, 13, 20, 10), cohort=0, shape=shape, classes=10, local=local)
    fast = Stacked(fed, device="cuda", precision=precision, compile=True)
    plain = Serial(fed, device="cuda", precision="float32")
    ways: list[tuple[Engine, int]] = [(fast, 0), (fast, 3), (plain, 3)]
    before, after, want = (everything(rounds(fed, FedAvg(), engine, count), engine) for engine, count in ways)
    for leaf, was in before.items():
        far = (after[leaf] - want[leaf]).norm() / (want[leaf] - was).norm()
        assert far < 0.3, leaf


def test_a_cohort_that_does_not_fit_is_trained_in_stacks_as_large_as_fit() -> None:
    fed = federation(mlp(), sizes=(64,) * 12, cohort=0, shape=(784,), classes=10, local=Local(lr=0.05, batch=32))
    whole, narrow = (Stacked(fed, device="cuda", precision="float64") for _ in range(2))
    narrow.device_memory = 40 << 20
    one, other = (rounds(fed, Scaffold(), engine, 3).params for engine in (whole, narrow))
    assert whole.width > 12 > narrow.width > 1
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-10, atol=1e-10)


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
    rounds(fed, FedAvg(), engine, 3)  # not raised here: checking in every round would wait for the device
    with pytest.raises(TrainingError, match="round 1: the training of client 3 turned into not-a-number"):
        engine.settle()


def plain_round(fed: Federation, module: nn.Module, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FedAvg written by hand: all data on the GPU, one client after another."""
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


# -- several runs at once


def cells(seeds: tuple[int, ...], make: Callable[[], nn.Module], **options: object) -> list[Federation]:
    """Federations with the same layers, whose models, samples and draws depend on the seed."""
    made = []
    for seed in seeds:
        torch.manual_seed(seed)
        module = make()
        fed = federation(module, seed=seed, **options)  # type: ignore[arg-type]
        made.append(replace(fed, network=Network(module, make.__name__)))
    return made


def run_together(feds: list[Federation], method: Method, counts: list[int], **options: object) -> list[Tree]:
    def work(fed: Federation, count: int, seat: Seat | None) -> Tree:
        engine = Stacked(fed, device="cuda", seat=seat, **options)  # type: ignore[arg-type]
        return everything(rounds(fed, method, engine, count), engine)

    works = [partial(work, fed, count) for fed, count in zip(feds, counts, strict=True)]
    found = dict(side_by_side(works))
    return [found[number] for number in range(len(feds))]


def at_once_equals_alone(feds: list[Federation], method: Method, counts: list[int], **options: object) -> None:
    """Check that runs at once give the same as single runs. A joint visit that fails and is split fails the test, by
    its warning."""
    several = run_together(feds, method, counts, precision="float64", **options)
    for fed, count, got in zip(feds, counts, several, strict=True):
        engine = Stacked(fed, device="cuda", precision="float64")
        want = everything(rounds(fed, method, engine, count), engine)
        assert got.keys() == want.keys()
        for name, value in got.items():
            torch.testing.assert_close(value, want[name], rtol=1e-10, atol=1e-10)


AT_ONCE = [FedAvg(), Scaffold() + FedAdam(lr=0.05), CHAINS[4], CHAINS[5]]


@pytest.mark.parametrize("cohort", [0, 4], ids=["everybody, recorded", "another cohort each round"])
@pytest.mark.parametrize("method", AT_ONCE, ids=str)
def test_runs_at_once_equal_runs_alone(method: Method, cohort: int) -> None:
    at_once_equals_alone(cells((0, 1, 2), linear5, cohort=cohort), method, [5, 2, 4])


@pytest.mark.parametrize("latency_clients", [3, None], ids=["in quarters", "in two tracks"])
@pytest.mark.parametrize("cohort", [0, 16])
@pytest.mark.parametrize("method", AT_ONCE, ids=str)
def test_ragged_runs_at_once_equal_runs_alone(
    method: Method, cohort: int, latency_clients: int | None, gpu_with_latency_clients: Callable[[int], None]
) -> None:
    if latency_clients is not None:  # otherwise the engine's own estimate
        gpu_with_latency_clients(latency_clients)
    feds = cells((0, 1, 2), linear5, sizes=UNEVEN, cohort=cohort, local=Local(lr=0.05, batch=1))
    at_once_equals_alone(feds, method, [5, 2, 4])


def test_compiled_runs_at_once_equal_runs_alone() -> None:
    at_once_equals_alone(cells((0, 1), linear5, cohort=0), Scaffold(), [3, 3], compile=True)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_the_same_runs_at_once_give_the_same_bits_again(precision: str) -> None:
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    feds = cells((1, 2), dropout_cnn, shape=(1, 6, 6), cohort=4, local=Local(lr=0.05, batch=4))
    one, other = (run_together(feds, Scaffold(), [4, 4], precision=precision) for _ in range(2))
    for mine, again in zip(one, other, strict=True):
        assert all(torch.equal(mine[name], again[name]) for name in mine)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == flags


def test_engines_share_one_copy_of_the_samples_on_the_device() -> None:
    fed = federation()
    one, other = Stacked(fed, device="cuda"), Stacked(replace(fed, seed=9), device="cuda")
    assert one.x.data_ptr() == other.x.data_ptr()
    fed.x[0] += 1
    assert torch.equal(Stacked(fed, device="cuda").x.cpu(), fed.x)


def test_small_runs_at_once_are_faster_than_one_after_another() -> None:
    options = {"sizes": (600,) * 10, "cohort": 0, "shape": (784,), "classes": 10, "auxiliary": 0}
    feds = cells(tuple(range(8)), mlp, local=Local(lr=0.05, batch=10), **options)

    def one_after_another() -> None:
        for fed in feds:
            run_together([fed], FedAvg(), [20])

    alone, several = seconds(one_after_another), seconds(lambda: run_together(feds, FedAvg(), [20] * 8))
    print(f"8 runs one after another {alone:.2f} s, at once {several:.2f} s, {alone / several:.1f} times faster")
    assert several < alone

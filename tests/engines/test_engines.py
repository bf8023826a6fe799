"""The engines: ragged cohorts, precision, memory, cost, and what they say when something fails."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from equipoise import Stacked
from equipoise.core import client, tree
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env
from equipoise.core.engine import Engine
from equipoise.core.errors import ConfigError, TrainingError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.network import Network
from equipoise.core.round import one_round, start
from equipoise.core.sums import Sums
from equipoise.core.tree import Tree
from equipoise.core.turn import State
from equipoise.engines import Serial, visits
from equipoise.fast import programs
from equipoise.methods import FedNova, Scaffold
from tests.federations import SIZES, dropout_cnn, federation, image_federation, linear, norm_cnn
from tests.toys import Lanes, Picky, Visits

Make = Callable[..., Engine]
on_both_engines = pytest.mark.parametrize("make", [Stacked, Serial])


def play(fed: Federation, method: Method, engine: Engine, rounds: int = 1) -> tuple[State, Sums]:
    chain = Chain(method)
    state = start(fed, chain, engine)
    for _ in range(rounds):
        state, sums = one_round(state, fed, chain, engine)
    return state, sums


def distance(a: Tree, b: Tree) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


# -- ragged cohorts


def samples_trained(fed: Federation) -> tuple[int, int]:
    """How many samples the stacked engine pushes through the model in a round, padding included; and in how many
    steps."""
    seen, step = [], visits.step

    def counted(task: Any, visit: Any, carry: Any, store: Any, rows: Tensor, *rest: Any) -> Any:
        seen.append(rows[:, 0].numel())
        return step(task, visit, carry, store, rows, *rest)

    with mock.patch.object(visits, "step", counted):
        play(fed, FedAvg(), Stacked(fed))
    return sum(seen), len(seen)


def test_short_clients_do_not_pay_for_long_ones() -> None:
    """Where every batch is full, nothing is done that the clients alone would not do."""
    sizes = (160, 4, 8, 4, 40, 4, 4, 12)
    fed = federation(sizes=sizes, cohort=0, local=Local(lr=0.1, batch=4, epochs=2))
    trained, steps = samples_trained(fed)
    assert trained == 2 * sum(sizes)
    assert steps == 2 * 160 // 4  # and as many steps as the longest needs, not more


def test_padding_is_less_than_twice_what_is_needed() -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = tuple((torch.randn(80, generator=draw) * 1.5 + 3).exp().long().clamp(min=1).tolist())
    fed = federation(sizes=sizes, cohort=0, local=Local(lr=0.01, batch=32))
    trained, _ = samples_trained(fed)
    assert min(sizes) < 5
    assert max(sizes) > 300
    assert trained < 2 * sum(-(-n // 32) * min(n, 32) for n in sizes)


def test_tiny_clients_are_not_padded_to_a_full_batch() -> None:
    fed = federation(sizes=(64, *[1] * 40), cohort=0, local=Local(lr=0.01, batch=32))
    assert samples_trained(fed)[0] == 64 + 40


def test_batches_of_a_share_of_each_client_are_not_padded_to_the_largest() -> None:
    sizes = (3, 2000, 4, 40, 2, 30, 1500, 100)
    local = Local(lr=0.01, steps_per_epoch=2)
    fed = federation(sizes=sizes, cohort=0, local=local)
    trained, _ = samples_trained(fed)
    batch, steps = local.batches(torch.tensor(sizes))
    assert trained < 2 * int((batch * steps).sum())
    one, other = (play(fed, FedAvg(), make(fed, precision="float64"))[0].params for make in (Stacked, Serial))
    assert distance(one, other) < 1e-12


WIDTHS = [1, 2, 3, 5, 64]


@pytest.mark.parametrize("method", [FedAvg(), Scaffold()], ids=str)
def test_the_width_of_blocks_does_not_change_results(method: Method) -> None:
    fed = federation(cohort=0)
    results = [play(fed, method, Stacked(fed, precision="float64", width=width), 3)[0] for width in WIDTHS]
    for other in results[1:]:
        assert distance(results[0].params, other.params) < 1e-12
        if method != FedAvg():
            assert distance(results[0].slots, other.slots) < 1e-12


@pytest.mark.parametrize("latency_clients", [1, 3])
@pytest.mark.parametrize("method", [FedAvg(), Scaffold()], ids=str)
def test_a_stack_that_shrinks_gives_the_same(
    method: Method, latency_clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, in parts of few shapes."""
    fed = federation(sizes=(3, 20, 9, 25, 14, 30, 7, 33, 5) * 2, cohort=0, local=Local(lr=0.05, batch=1))
    one, _ = play(fed, method, Serial(fed, precision="float64"), 3)
    monkeypatch.setattr(Stacked, "_latency_clients", lambda engine, local: latency_clients)
    monkeypatch.setattr(Stacked, "_few_shapes", True)
    counted = mock.Mock(wraps=programs.advance)
    monkeypatch.setattr(programs, "advance", counted)
    other, _ = play(fed, method, Stacked(fed, precision="float64", width=64), 3)
    assert distance(one.params, other.params) < 1e-12
    if method != FedAvg():
        assert distance(one.slots, other.slots) < 1e-12
    assert len({call.args[-1]["rows"].shape[0] for call in counted.call_args_list}) <= 5


def test_a_width_is_found_for_any_model() -> None:
    small, large = federation(), federation(nn.Linear(5, 3))
    assert Stacked(small).width >= 1
    large = replace(large, network=Network(nn.Sequential(nn.Linear(5, 3000), nn.Linear(3000, 3))))
    assert 1 <= Stacked(large).width <= Stacked(small).width


@on_both_engines
def test_a_client_may_be_drawn_twice(make: Make) -> None:
    """As in sampling with replacement: it counts twice. But it has one memory, of which one change would be lost."""
    fed = federation()
    state, sums = play(fed, Picky((3, 1, 3)), make(fed, precision="float64"))
    assert sums.weight.item() == 2 * SIZES[3] + SIZES[1]
    once, _ = play(fed, Picky((1, 3)), make(fed, precision="float64"))
    assert distance(state.params, once.params) > 1e-6
    with pytest.raises(ConfigError, match="method: client 3 trains 2 times at once in a round, where scaffold keeps"):
        play(fed, Picky((3, 1, 3)) + Scaffold(), make(fed))
    play(fed, Lanes(((3, 1), (3, 0))) + Visits(), make(fed))  # one after the other in a lane
    with pytest.raises(ConfigError, match="method: client 1 trains 2 times at once in a round, where visits keeps"):
        play(fed, Lanes(((3, 1), (1, 0))) + Visits(), make(fed))


# -- models


class Scaled(nn.Module):
    """A parameter without an axis, and constants that training must leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.fixed = nn.Parameter(torch.tensor([0.1, 0.7, 0.3]), requires_grad=False)
        self.register_buffer("table", torch.tensor([0.1, 1 / 3, -torch.inf]))
        self.register_buffer("places", torch.tensor([-3, -2, 5]))
        self.register_buffer("flag", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x) * self.temperature + self.fixed
        return outputs


@on_both_engines
def test_scalars_are_trained_and_constants_stay_to_the_bit(make: Make) -> None:
    torch.manual_seed(0)
    module = Scaled()
    fed = federation(module)
    state, _ = play(fed, FedAvg(), make(fed), 5)
    assert state.params.keys() == {"temperature", "linear.weight", "linear.bias"}
    assert state.params["temperature"] != 1.5
    for name in ("fixed", "table", "places", "flag"):
        assert torch.equal(state.buffers[name], getattr(module, name)), name


@on_both_engines
def test_a_client_of_one_sample_trains_through_batch_norm(make: Make) -> None:
    torch.manual_seed(0)
    fed = federation(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), cohort=0)
    assert 1 in SIZES
    state, _ = play(fed, FedAvg(), make(fed, precision="float64"), 2)
    other, _ = play(fed, FedAvg(), Serial(fed, precision="float64"), 2)
    assert distance(state.params, other.params) < 1e-10
    assert distance(state.buffers, other.buffers) < 1e-10


def test_a_step_with_norm_and_dropout_is_one_graph() -> None:
    torch.manual_seed(0)
    fed = federation(nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)), sizes=(4, 4), cohort=0)
    torch.compiler.reset()
    traced, eager = (Stacked(fed, precision="float64", compile=backend) for backend in ("aot_eager", False))
    traced.compile_around = True
    one, other = play(fed, FedAvg(), traced)[0], play(fed, FedAvg(), eager)[0]
    assert distance(one.params, other.params) < 1e-12


def colour_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(20, 3)
    )


@pytest.mark.parametrize("options", [{"width": 1}, {"width": 1, "compile": "aot_eager"}, {"width": 4}], ids=str)
def test_convolutions_of_one_client_and_of_a_stack_equal_the_serial_ones(options: dict[str, Any]) -> None:
    fed = federation(colour_cnn(), shape=(3, 6, 6), cohort=0)
    fed.network.check(fed.x[:2], 3)
    one, other = (
        play(fed, FedAvg(), make, 2)[0]
        for make in (Stacked(fed, precision="float64", **options), Serial(fed, precision="float64"))
    )
    assert distance(one.params, other.params) < 1e-10
    assert distance(one.buffers, other.buffers) < 1e-10


def test_on_cpu_a_stack_of_one_is_no_vmap() -> None:
    """It would lay images out anew around every convolution, and lose what is gained by the channels last."""
    fed = federation(colour_cnn(), shape=(3, 6, 6))
    stacks, step = [], client.step

    def watched(task: Any, visit: Any, carry: Any, batch: Any, *rest: Any) -> Any:
        stacks.append(torch._C._functorch.is_batchedtensor(batch.x))
        return step(task, visit, carry, batch, *rest)

    with mock.patch.object(client, "step", watched):
        play(fed, FedAvg(), Stacked(fed))
        assert stacks
        assert not any(stacks)
        play(fed, FedAvg(), Stacked(fed, width=4))
        assert any(stacks)


# -- precision


@on_both_engines
@pytest.mark.parametrize("network", [linear, norm_cnn, dropout_cnn])
def test_bf16_trains_near_float32_and_keeps_float32_parameters(make: Make, network: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = network()
    fed = federation(module) if network is linear else image_federation(module)
    exact, _ = play(fed, FedAvg(), make(fed), 2)
    rough, _ = play(fed, FedAvg(), make(fed, precision="bf16"), 2)
    assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(rough.params))
    moved = distance(exact.params, {k: v.float() for k, v in fed.network.params.items()})
    assert 0 < distance(exact.params, rough.params) < 0.3 * moved


def test_precision_and_device_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"train.precision = 'bf61': expected one of .*; did you mean 'bf16'\?"):
        Stacked(federation(), precision="bf61")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"train.device = 'cuda': torch finds no CUDA device here"):
            Stacked(federation(), device="cuda")


# -- failures


def poisoned(client: int = 3) -> Federation:
    """One client has a sample that is no number."""
    fed = federation(nn.Linear(5, 3), cohort=0)
    fed.x[fed.indices[fed.offsets[client]]] = torch.inf
    return fed


@on_both_engines
def test_a_training_that_turns_nan_names_round_and_client(make: Make) -> None:
    fed = poisoned()
    with pytest.raises(TrainingError, match="round 1: the training of client 3 turned into not-a-number"):
        play(fed, FedAvg(), make(fed))
    named = replace(fed, roster=tuple("abcdef"))
    with pytest.raises(TrainingError, match=r"round 1: the training of client d \(3\) turned"):
        play(named, FedAvg(), make(named))


@on_both_engines
def test_the_round_named_is_the_one_that_failed(make: Make) -> None:
    fed = federation(nn.Linear(5, 3), cohort=0, local=Local(lr=1e12, weight_decay=1.0, batch="full"))
    with pytest.raises(TrainingError, match=r"round 4: .*; try a smaller local.lr, or local.clip"):
        play(fed, FedAvg(), make(fed), 9)


@dataclass(frozen=True)
class NanUpload(Method):
    """Its delta is fine and what it uploads and keeps is not."""

    name = "nan_upload"

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return {"bad": torch.log(-env.weight)}, env.memory


@on_both_engines
def test_an_upload_that_is_no_number_is_found(make: Make) -> None:
    fed = federation()
    with pytest.raises(TrainingError, match=r"round 1: the training of client . turned into not-a-number"):
        play(fed, NanUpload(), make(fed))


@dataclass(frozen=True)
class Broken(Method):
    """Fails at one tap, directly or in a helper of its own."""

    tap: str = "grads"

    name = "broken"

    def _fail(self, tap: str) -> None:
        if self.tap == tap:
            raise ZeroDivisionError("nothing to divide by")

    def grads(self, grads: Tree, env: Env) -> Tree:
        self._fail("grads")
        return tree.map(lambda g: g, grads)

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        if self.tap == "losses":
            return tree.map(lambda x: x["none"], {"l": losses})["l"]  # type: ignore[no-any-return]
        return losses

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        self._fail("finish")
        return {}, env.memory


@pytest.mark.parametrize(
    ("tap", "error"),
    [("grads", "ZeroDivisionError: nothing"), ("losses", "IndexError: "), ("finish", "ZeroDivision")],
)
def test_the_serial_engine_names_client_method_and_tap(tap: str, error: str) -> None:
    fed = federation()
    with pytest.raises(TrainingError, match=rf"client 5, method broken, tap {tap}: {error}"):
        play(fed, Picky((5, 2)) + Broken(tap), Serial(fed))


class Choosy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 3:
            raise ValueError("three is a crowd")
        return super().forward(x)


def test_the_serial_engine_blames_the_model_for_its_own_errors() -> None:
    fed = federation(Choosy(5, 3), local=Local(batch=4))  # client 0 has 7 samples
    with pytest.raises(TrainingError, match="client 0, the model or the optimiser: ValueError: three is a crowd"):
        play(fed, Picky((0,)), Serial(fed))


def test_the_stacked_engine_says_what_failed_and_who_knows_more() -> None:
    fed = federation()
    with pytest.raises(
        TrainingError, match=r"trained together: ZeroDivisionError: nothing .*; train.engine = 'serial'"
    ):
        play(fed, Broken("grads"), Stacked(fed))


# -- memory


@on_both_engines
def test_memory_is_made_for_seen_clients_only_and_has_a_limit(make: Make) -> None:
    fed = federation(sizes=(4,) * 40, cohort=3)
    row = tree.nbytes(fed.network.params)
    engine = make(fed, memory_gib=8 * row / 2**30)
    chain = Chain(Scaffold())
    state = start(fed, chain, engine)
    seen: set[int] = set()
    for round in range(2):
        seen |= set(fed.draw(round).tolist())
        state, _ = one_round(state, fed, chain, engine)
    kept = engine.memory.methods["scaffold"]
    assert kept.seen == len(seen)
    assert set(engine.memory.save()["scaffold"]["clients"].tolist()) == seen
    assert tree.nbytes(kept.stack) <= 8 * row
    with pytest.raises(TrainingError, match=rf"train.memory_gib = .*: scaffold keeps {row} bytes at each client"):
        play(fed, Scaffold(), engine, 7)


# -- sums


@on_both_engines
def test_bytes_and_counts_of_a_round(make: Make) -> None:
    fed = federation(cohort=0)
    model = tree.nbytes(fed.network.params)
    _, plain = play(fed, FedAvg(), make(fed))
    _, more = play(fed, Scaffold(), make(fed))
    assert plain.clients == 6
    assert plain.samples == plain.weight == sum(SIZES)
    assert plain.down == 6 * model
    assert plain.up == 6 * (model + 8)  # and the weight
    assert more.down - plain.down == more.up - plain.up == 6 * model


@dataclass(frozen=True)
class Weightless(Method):
    name = "weightless"

    def weight(self, weight: Tensor, env: Env) -> Tensor:
        return weight * 0


@on_both_engines
def test_clients_without_weight_do_not_move_the_model(make: Make) -> None:
    fed = federation()
    state, sums = play(fed, Weightless(), make(fed), 2)
    assert sums.weight == 0
    assert distance(state.params, fed.network.params) == 0


@on_both_engines
def test_a_round_leaves_the_state_before_it_alone(make: Make) -> None:
    fed = image_federation(norm_cnn())
    engine, chain = make(fed), Chain(Scaffold())
    state = start(fed, chain, engine)
    parts = (state.params, state.buffers, state.slots)
    before = [tree.map(torch.clone, part) for part in parts]
    one_round(state, fed, chain, engine)
    assert all(distance(old, new) == 0 for old, new in zip(before, parts, strict=True))


@on_both_engines
@pytest.mark.parametrize("method", [FedAvg(), Scaffold(), FedNova()], ids=str)
def test_a_learning_rate_that_has_reached_zero_moves_nothing(make: Make, method: Method) -> None:
    fed = federation(local=Local(lr=0.1, batch=4, schedule="linear", horizon=1))
    engine = make(fed)
    first, _ = play(fed, method, engine, 1)
    state, _ = one_round(first, fed, Chain(method), engine)
    assert distance(state.params, first.params) == 0
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(state.slots))
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(engine.memory.save()))


def test_outputs_do_not_depend_on_the_size_of_chunks() -> None:
    fed = image_federation(norm_cnn())
    engine = Stacked(fed, precision="float64")
    state = start(fed, Chain(), engine)
    whole = engine.outputs(state.params, state.buffers, fed.x)
    parts = engine.outputs(state.params, state.buffers, fed.x, chunk=7)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


# -- cost


def crowd(clients: int) -> Federation:
    """Many clients of four samples each, which share a few thousand samples."""
    fed = federation(sizes=(1000,) * 4, cohort=100, local=Local(lr=0.1, batch=4, epochs=8))
    indices = torch.arange(4 * clients, dtype=torch.int32) % 4000
    return replace(fed, offsets=4 * torch.arange(clients + 1), indices=indices)


def seconds_per_round(feds: list[Federation], rounds: int) -> list[float]:
    """The median of each, measured in turns."""
    engines: list[Any] = [Stacked(fed) for fed in feds]
    states = [start(fed, Chain(), engine) for fed, engine in zip(feds, engines, strict=True)]
    taken: list[list[float]] = [[] for _ in feds]
    for _ in range(rounds):
        for i, (fed, engine) in enumerate(zip(feds, engines, strict=True)):
            began = time.perf_counter()
            states[i], _ = one_round(states[i], fed, Chain(), engine)
            taken[i].append(time.perf_counter() - began)
    return [statistics.median(some[2:]) for some in taken]


def test_a_round_costs_the_same_with_a_thousand_and_a_million_clients() -> None:
    feds = [crowd(1_000), crowd(1_000_000)]
    ratios = []
    for _ in range(3):  # other processes may disturb one measurement, hardly three
        few, many = seconds_per_round(feds, 17)
        ratios.append(many / few)
        if ratios[-1] < 1.2:
            return
    pytest.fail(f"a round with a million clients takes {min(ratios):.2f} times as long as with a thousand")


@dataclass(frozen=True)
class CountClients(Method):
    """Refuses to be shown anything as long as the population."""

    name = "count_clients"

    def address(self, slot: Tree, ids: Tensor) -> Tree:
        assert len(ids) <= 100
        return {}


def test_the_server_addresses_the_cohort_only() -> None:
    fed = crowd(10_000)
    _, sums = play(fed, CountClients(), Stacked(fed))
    assert sums.clients == 100

"""The pass that replaces gradients and SGD steps of dense layers by one operator in compiled programs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.round import one_round, start
from equipoise.core.tree import Tree
from equipoise.engines import Serial
from equipoise.engines.precision import arithmetic
from equipoise.fast import compiling
from equipoise.fast import dense_pass as dense
from equipoise.methods import FedDyn, FedProx, FedShift, Scaffold
from tests.federations import federation

RAGGED = (17, 32, 4, 40, 15, 19)
EVEN = (16,) * 6  # one shape, for tests that need no finished clients: each shape takes seconds to compile


def layers() -> nn.Module:
    """The middle layer has no bias."""
    torch.manual_seed(4)
    middle = nn.Linear(16, 8, bias=False)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), middle, nn.Tanh(), nn.Linear(8, 3))


def trained(
    engine: type[Engine], method: Method, local: Local, sizes: tuple[int, ...] = EVEN, **options: Any
) -> Tree:
    fed = federation(layers(), sizes=sizes, cohort=len(sizes), local=local)
    chain, made = Chain(method), engine(fed, precision="float64", **options)
    state = start(fed, chain, made)
    for _ in range(2):
        state, _ = one_round(state, fed, chain, made)
    return state.params


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many leaves the pass replaced in each program; the pass is applied to programs on a CPU, too."""
    counts: list[int] = []

    def everywhere(graph: Graph) -> None:
        counts.append(dense.fuse(graph, everywhere=True))

    monkeypatch.setitem(compiling.OPTIONS["inductor"], "post_grad_custom_post_pass", everywhere)
    monkeypatch.setattr(compiling, "_COMPILED", {})
    yield counts  # the function above has no `uuid`, so that inductor caches nothing that it changed
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("method", "local", "sizes"),
    [
        (FedAvg(), {}, RAGGED),
        (FedAvg(), {"weight_decay": 0.01}, EVEN),
        (Scaffold(), {"weight_decay": 0.01}, RAGGED),
        (FedProx(mu=0.1), {}, EVEN),
        (FedDyn(alpha=0.1), {}, EVEN),
        (FedShift(), {}, EVEN),
    ],
    ids=["plain", "decay", "scaffold", "fedprox", "feddyn", "fedshift"],
)
def test_one_operator_updates_the_weights_and_biases_of_all_layers(
    method: Method, local: dict[str, Any], sizes: tuple[int, ...], fused: list[int]
) -> None:
    settings = Local(lr=0.1, batch=8, **local)
    here = trained(Stacked, method, settings, sizes, compile=True, width=len(sizes))
    assert max(fused) == 5
    there = trained(Serial, method, settings, sizes)
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), here, there)


@pytest.mark.parametrize("local", [{"momentum": 0.9}, {"clip": 1.0}, {"optimiser": "adam"}], ids=str)
def test_updates_that_read_a_gradient_twice_are_left_alone(local: dict[str, Any], fused: list[int]) -> None:
    settings = Local(lr=0.1, batch=8, **local)
    here = trained(Stacked, FedAvg(), settings, compile=True, width=len(EVEN))
    assert set(fused) == {0}
    there = trained(Serial, FedAvg(), settings)
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), here, there)


def test_products_of_few_clients_use_the_kernel_with_small_tiles(
    fused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    products, product = [], torch.ops.equipoise.product.default
    fuse = dense.fuse

    def counted(graph: Graph, everywhere: bool = False) -> int:
        found = fuse(graph, everywhere)
        products.append(len(graph.find_nodes(op="call_function", target=product)))
        return found

    monkeypatch.setattr(dense, "fuse", counted)
    settings = Local(lr=0.1, batch=8)
    here = trained(Stacked, FedAvg(), settings, compile=True, width=len(EVEN))
    assert (max(products), max(fused)) == (5, 5)  # outputs of three layers, and gradients of the inputs of two
    there = trained(Serial, FedAvg(), settings)
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), here, there)


def test_programs_on_a_cpu_are_left_alone(fused: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fuse = dense.fuse
    monkeypatch.setattr(dense, "fuse", lambda graph, everywhere: fuse(graph))  # the default of `everywhere`
    trained(Stacked, FedAvg(), Local(lr=0.1, batch=8), compile=True, width=len(EVEN))
    assert set(fused) == {0}


def given(clients: int, batch: int, widths: tuple[int, ...], own_rates: bool, stops: bool, device: str) -> Any:
    """Arguments of `descend`. Every leaf has three terms: its values, one that all clients share, and another with a
    row for each client."""
    torch.manual_seed(1)
    layers = list(pairwise(widths))
    g = [torch.randn(clients, batch, after, device=device) for _, after in layers]
    x = [torch.randn(clients, batch, before, device=device) for before, _ in layers]
    biased = [number for number in range(len(layers)) if number != 1]
    leaves = [(after, before) for before, after in layers] + [(layers[number][1],) for number in biased]
    terms = [
        torch.randn(shape, device=device) for leaf in leaves for shape in ((clients, *leaf), leaf, (clients, *leaf))
    ]
    rate = torch.rand(clients, device=device) if own_rates else torch.tensor(0.3, device=device)
    times = (torch.tensor(2, device=device), torch.arange(clients, device=device) % 4) if stops else (None, None)
    return g, x, biased, terms, rate, *times, [0.0, 1.0, 0.5, -0.25], [-1.0, -0.1, 0.0, 0.7]


def test_the_operator_computes_the_update_of_every_client() -> None:
    g, x, _, terms, rate, step, steps, *_ = arguments = given(4, 3, (5, 4, 2), True, True, "cpu")
    weight, _, bias = torch.ops.equipoise.descend(*arguments)
    for client in range(4):
        gradients: list[Tensor] = [sum(torch.outer(a, b) for a, b in zip(g[0][client], x[0][client], strict=True))]  # type: ignore[list-item]
        gradients.append(g[0][client].sum(0))
        lr = rate[client]
        for new, gradient, (own, shared, other) in zip(
            (weight, bias), gradients, (terms[:3], terms[6:9]), strict=True
        ):
            moved = (1 - 0.1 * lr) * own[client] - lr * gradient + 0.5 * shared + (0.7 * lr - 0.25) * other[client]
            torch.testing.assert_close(new[client], moved if step < steps[client] else own[client])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "tf32"])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize(
    ("clients", "batch", "widths"), [(12, 32, (784, 128, 128, 10)), (5, 7, (65, 130, 17, 3)), (3, 100, (64, 64, 1))]
)
def test_the_descend_kernel_equals_torch(
    clients: int, batch: int, widths: tuple[int, ...], stops: bool, fast: bool
) -> None:
    arguments = given(clients, batch, widths, stops, stops, "cuda")
    expected = dense.descend_by_torch(*torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, arguments))
    near = 0.1 if fast else 1e-4
    with arithmetic(torch.device("cuda"), "tf32" if fast else "float32"):
        found = torch.ops.equipoise.descend(*arguments)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=near, atol=near)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "tf32"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("clients", "batch", "inputs", "outputs"), [(12, 32, 784, 128), (3, 50, 600, 13), (2, 5, 9, 3)]
)
def test_the_product_kernel_equals_torch(
    clients: int, batch: int, inputs: int, outputs: int, transposed: bool, fast: bool
) -> None:
    torch.manual_seed(2)
    a, b = torch.randn(clients, batch, inputs), torch.randn(clients, inputs, outputs)
    near = 0.1 if fast else 1e-4
    with arithmetic(torch.device("cuda"), "tf32" if fast else "float32"):
        ours = torch.ops.equipoise.product(a.cuda(), (b.mT if transposed else b).contiguous().cuda(), transposed)
    torch.testing.assert_close(ours.cpu(), a @ b, rtol=near, atol=near)

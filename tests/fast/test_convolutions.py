"""Convolutions of stacked clients: our operators give the same values and gradients as torch's convolution."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise import Stacked
from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.local import Local
from equipoise.core.network import Context, Network
from equipoise.core.round import one_round, start
from equipoise.fast import compiling, convolutions
from equipoise.fast.convolutions import Convolution, conv2d, stackable_conv2d
from equipoise.fast.materialise import register_inductor_lowering
from tests.federations import federation

CLIENTS = 3


class Layer(NamedTuple):
    batch: int
    size: tuple[int, int]
    channels: int
    filters: int
    window: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    def draw(self, clients: int = CLIENTS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(clients, self.batch, self.channels, *self.size, generator=generator, dtype=torch.float64)
        weight = torch.randn(clients, self.filters, self.channels, *self.window, generator=generator, dtype=x.dtype)
        return x.to(dtype), weight.to(dtype)


LAYERS = {
    "5x5": Layer(4, (9, 8), 3, 6, (5, 5)),
    "padded": Layer(2, (7, 7), 16, 8, (3, 3), (1, 1), (1, 1)),
    "stride 2": Layer(2, (8, 9), 4, 5, (3, 3), (2, 2), (1, 1)),
    "1x1, stride 2": Layer(3, (7, 6), 4, 8, (1, 1), (2, 2)),
    "uneven": Layer(1, (11, 6), 3, 2, (3, 2), (3, 1), (2, 0)),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def by_torch(x: Tensor, weight: Tensor, stride: Any, padding: Any) -> Tensor:
    return F.conv2d(x, weight, None, stride, padding)


def step(convolve: Callable[..., Tensor], layer: Layer) -> Step:
    """A function that gives the gradients with respect to the samples and the weights of all clients, by vmap."""

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return convolve(x, weight, layer.stride, layer.padding).sin().square().sum()

    return torch.vmap(torch.func.grad(loss, argnums=(0, 1)))


# -- the operators


@each_layer
def test_values_of_stacked_clients_equal_torch(layer: Layer) -> None:
    x, weight = layer.draw()
    got = torch.vmap(lambda x, w: stackable_conv2d(x, w, layer.stride, layer.padding))(x, weight)
    want = torch.stack([by_torch(*pair, layer.stride, layer.padding) for pair in zip(x, weight, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@each_layer
@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_gradients_of_stacked_clients_equal_torch(layer: Layer, backend: str | None) -> None:
    ours = step(stackable_conv2d, layer)
    if backend:
        torch._dynamo.reset()
        ours = torch.compile(ours, fullgraph=True, dynamic=False, backend=backend)
    for got, want in zip(ours(*layer.draw()), step(by_torch, layer)(*layer.draw()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_inductor_compiles_the_operators() -> None:
    torch._dynamo.reset()
    layer = LAYERS["padded"]
    ours = torch.compile(step(stackable_conv2d, layer), fullgraph=True, dynamic=False)
    for got, want in zip(ours(*layer.draw()), step(by_torch, layer)(*layer.draw()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dims", [(0, None), (None, 0)], ids=["shared weights", "shared samples"])
def test_weights_or_samples_may_be_shared_by_all_clients(dims: tuple[int | None, int | None]) -> None:
    layer = LAYERS["stride 2"]
    x, weight = layer.draw()
    given = tuple(part if dim == 0 else part[0] for part, dim in zip((x, weight), dims, strict=True))

    def gradients(convolve: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        def loss(x: Tensor, weight: Tensor) -> Tensor:
            return convolve(x, weight, layer.stride, layer.padding).square().sum()

        both: tuple[Tensor, Tensor] = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=dims)(*given)
        return both

    for got, want in zip(gradients(stackable_conv2d), gradients(by_torch), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_vmap_can_be_nested() -> None:
    layer = LAYERS["padded"]
    x, weight = layer.draw(clients=6)
    pairs = [
        part.unflatten(0, (2, 3)).movedim(0, 2) for part in (x, weight)
    ]  # the outer axis in the middle of the shape
    got = torch.vmap(step(stackable_conv2d, layer), in_dims=2)(*pairs)
    for mine, want in zip(got, step(by_torch, layer)(x, weight), strict=True):
        torch.testing.assert_close(mine.flatten(0, 1), want, rtol=1e-10, atol=1e-10)


@each_layer
def test_gradients_of_gradients(layer: Layer) -> None:
    x, weight = (part[0].requires_grad_() for part in layer._replace(batch=1).draw())
    assert torch.autograd.gradgradcheck(lambda x, w: stackable_conv2d(x, w, layer.stride, layer.padding), (x, weight))


def squared_gradient(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda weight: torch.func.grad(f)(weight).square().sum())


def forward(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    return lambda weight: torch.func.jvp(f, (weight,), (weight.cos(),))[1]


def hessian_times_vector(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    return forward(torch.func.grad(f))


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize("derived", [squared_gradient, forward, hessian_times_vector])
def test_second_and_forward_derivatives_of_stacked_clients(derived: Callable[..., Any], backend: str | None) -> None:
    layer = LAYERS["padded"]

    def of(convolve: Callable[..., Tensor]) -> Any:
        def client(weight: Tensor, x: Tensor) -> Any:
            return derived(lambda w: convolve(x, w, layer.stride, layer.padding).sin().square().sum())(weight)

        return torch.vmap(client)

    x, weight = layer.draw()
    ours = of(stackable_conv2d)
    if backend:
        torch._dynamo.reset()
        ours = torch.compile(ours, fullgraph=True, dynamic=False, backend=backend)
    want = of(by_torch)(weight, x)
    assert want.abs().max() > 1
    torch.testing.assert_close(ours(weight, x), want, rtol=1e-10, atol=1e-9)


class Calls(TorchDispatchMode):
    """Notes the names of our operators as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("equipoise::convolve"):
            self.names.append(name.partition("::")[2])
        return func(*args, **kwargs or {})


def test_the_gradient_of_the_samples_is_not_computed_unless_needed() -> None:
    layer = LAYERS["5x5"]
    x, weight = layer.draw()

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return stackable_conv2d(x, weight, layer.stride, layer.padding).square().sum()

    with Calls() as calls:
        torch.vmap(torch.func.grad(loss))(weight, x)
    assert calls.names == ["convolve", "convolve_weight"]


def test_channels_stay_last_in_memory_from_layer_to_layer() -> None:
    x, weight = LAYERS["padded"].draw()

    def two(x: Tensor, weight: Tensor) -> Tensor:
        inner = stackable_conv2d(x, weight, (1, 1), (1, 1)).relu()
        return stackable_conv2d(inner, weight.transpose(0, 1), (1, 1), (1, 1))

    y = torch.vmap(two)(x, weight)
    assert y.permute(0, 1, 3, 4, 2).is_contiguous()


# -- where the operators are used


@each_layer
def test_on_a_cpu_convolutions_are_bitwise_those_of_torch(layer: Layer) -> None:
    x, weight = layer.draw(dtype=torch.float32)
    bias = torch.randn(layer.filters)
    want = F.conv2d(x[0], weight[0], bias, layer.stride, layer.padding)
    assert torch.equal(conv2d(x[0], weight[0], bias, layer.stride, layer.padding), want)
    ours = torch.vmap(lambda x, w: conv2d(x, w, bias, layer.stride, layer.padding))(x, weight)
    theirs = torch.vmap(lambda x, w: F.conv2d(x, w, bias, layer.stride, layer.padding))(x, weight)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("dtype", "tf32", "fast"),
    [
        (torch.bfloat16, False, True),
        (torch.float16, False, True),
        (torch.float32, True, True),
        (torch.float32, False, False),
        (torch.float64, True, False),
    ],
)
def test_kernels_are_used_under_vmap_and_never_in_exact_arithmetic(
    dtype: torch.dtype, tf32: bool, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    values: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, dim=lambda: 4)
    answers: list[torch.dtype | None] = [convolutions._kernel_dtype(values, values)]
    torch.vmap(lambda x: answers.append(convolutions._kernel_dtype(values, values)) or x)(torch.zeros(2))  # type: ignore[func-returns-value]
    assert answers == [None, dtype if fast else None]


def test_only_plain_convolutions_of_a_network_become_ours() -> None:
    class Subclass(nn.Conv2d):
        pass

    plain = nn.Conv2d(2, 4, 3, stride=2, padding=1)
    others = [
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv2d(2, 4, 3, dilation=2),
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.Conv1d(2, 4, 3),
        Subclass(2, 4, 3),
    ]
    network = Network(nn.ModuleList([plain, *others]))
    assert [type(layer) for layer in network.module] == [Convolution, *map(type, others)]
    assert type(plain) is nn.Conv2d
    swapped = network.module[0]
    assert isinstance(swapped, nn.Conv2d)
    assert (swapped.kernel_size, swapped.stride, swapped.padding) == ((3, 3), (2, 2), (1, 1))
    assert torch.equal(network.params["0.weight"], plain.weight)


def test_gradients_of_a_network_with_our_convolutions_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 on a CPU, with other layers, under vmap, eagerly and compiled."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3)]
    network = Network(nn.Sequential(*layers, nn.Flatten(), nn.Linear(20, 3)).double())
    x, y = torch.randn(CLIENTS, 6, 3, 8, 8, dtype=torch.float64), torch.arange(CLIENTS * 6).view(CLIENTS, 6) % 3
    context = Context(torch.ones(6, dtype=torch.bool), torch.zeros((), dtype=torch.int64), True)
    params = {name: value.repeat(CLIENTS, *[1] * value.dim()) for name, value in network.params.items()}
    params = {name: value.view(CLIENTS, *network.params[name].shape) for name, value in params.items()}

    def gradients(params: Any, x: Tensor, y: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            outputs, _ = network(params, network.buffers, x, context)
            return F.cross_entropy(outputs, y)

        return torch.func.grad(loss)(params)

    want = torch.vmap(gradients)(params, x, y)
    monkeypatch.setattr(convolutions, "_kernel_dtype", lambda x, weight: x.dtype)
    torch._dynamo.reset()
    compiled = torch.compile(torch.vmap(gradients), fullgraph=True, dynamic=False, backend="aot_eager")
    with Calls() as calls:
        torch.vmap(gradients)(params, x, y)
    assert sorted(calls.names) == ["convolve", "convolve", "convolve_input", "convolve_weight", "convolve_weight"]
    for got in (torch.vmap(gradients)(params, x, y), compiled(params, x, y)):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-10)


def test_compiled_convolutions_read_the_same_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `materialised`, inductor would compute samples, weights and gradients again for every convolution that
    reads them."""
    monkeypatch.setattr(convolutions, "_kernel_dtype", lambda x, weight: x.dtype)
    torch.manual_seed(0)
    convolution = partial(nn.Conv2d, kernel_size=3, padding=1)
    network = Network(nn.Sequential(convolution(2, 4), nn.BatchNorm2d(4), nn.ReLU(), convolution(4, 4), nn.ReLU()))
    context = Context(torch.ones(3, dtype=torch.bool), torch.zeros((), dtype=torch.int64), True)
    params = tree.repeat(network.params, CLIENTS)

    def gradients(params: Any, x: Tensor) -> Any:
        return torch.func.grad(lambda mine: network(mine, network.buffers, x, context)[0].square().sum())(params)

    register_inductor_lowering()
    torch._dynamo.reset()
    compiled = torch.compile(torch.vmap(gradients), fullgraph=True, dynamic=False, options={"fx_graph_cache": False})
    x = torch.randn(CLIENTS, 3, 2, 6, 6)
    got, (code,) = run_and_get_code(compiled, params, x)
    for name, want in torch.vmap(gradients)(params, x).items():
        torch.testing.assert_close(got[name], want, rtol=1e-4, atol=1e-4)
    calls = re.findall(r"equipoise\.(convolve\w*)\.default\((?:\w+\()?(buf\d+).*?, (?:\w+\()?(buf\d+)", code)
    read = {kind: [operands for found, *operands in calls if found == kind] for kind, *_ in calls}
    assert {kind: len(found) for kind, found in read.items()} == {
        "convolve": 2,
        "convolve_input": 1,
        "convolve_weight": 2,
    }
    assert {x for x, _ in read["convolve"]} == {x for _, x in read["convolve_weight"]}
    ((g, weight),) = read["convolve_input"]
    assert weight in {weight for _, weight in read["convolve"]}
    assert g in {g for g, _ in read["convolve_weight"]}


def test_a_compiled_engine_with_our_convolutions_agrees_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but with torch instead of the kernels. Sizes are odd, since compilers may get those wrong."""
    first, second = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 9, 2)
    network = nn.Sequential(first, nn.MaxPool2d(2), nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    fed = federation(network, sizes=(9, 9, 9), cohort=0, shape=(1, 13, 13), local=Local(lr=0.02, batch=8))

    def trained(compile: bool) -> Any:
        engine = Stacked(fed, precision="float64", width=CLIENTS, compile=compile)
        return one_round(start(fed, Chain(), engine), fed, Chain(), engine)[0].params

    want = trained(compile=False)
    used = []
    monkeypatch.setattr(convolutions, "_kernel_dtype", lambda x, weight: used.append(True) or x.dtype)  # type: ignore[func-returns-value]
    monkeypatch.setattr(compiling, "_COMPILED", {})
    torch._dynamo.reset()
    for name, got in trained(compile=True).items():
        torch.testing.assert_close(got, want[name], rtol=1e-10, atol=1e-12)
    assert used


# -- the kernels

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

SHAPES = {
    **LAYERS,
    "CIFAR, 5x5": Layer(20, (32, 32), 3, 64, (5, 5)),
    "64 channels": Layer(9, (14, 14), 64, 64, (5, 5)),
    "128 channels": Layer(5, (16, 16), 128, 128, (3, 3), (1, 1), (1, 1)),
    "halving": Layer(5, (15, 16), 64, 128, (3, 3), (2, 2), (1, 1)),
    "odd channels": Layer(3, (10, 9), 24, 130, (2, 2)),
    "many pixels": Layer(100, (28, 28), 16, 32, (3, 3)),
}
TMA_SHAPES = {  # which the kernels for TMA support
    "rows of an image": Layer(3, (32, 32), 64, 64, (3, 3), (1, 1), (1, 1)),
    "whole images": Layer(16, (4, 4), 256, 512, (3, 3), (1, 1), (1, 1)),
    "images halved": Layer(8, (16, 16), 64, 128, (3, 3), (2, 2), (1, 1)),
    "1x1, images halved": Layer(8, (16, 16), 128, 64, (1, 1), (2, 2)),
    "thirds": Layer(2, (48, 24), 64, 64, (5, 4), (3, 3), (2, 1)),
    "a window that is not square": Layer(6, (8, 8), 128, 192, (5, 3), (1, 1), (2, 1)),
}


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.bfloat16, 1.5e-2), (torch.float16, 2e-3), (torch.float32, 4e-3)], ids=str
)
@pytest.mark.parametrize("layer", [*SHAPES.values(), *TMA_SHAPES.values()], ids=[*SHAPES, *TMA_SHAPES])
def test_kernels_equal_torch_and_give_the_same_bits_again(
    layer: Layer, dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    x, weight = (part.cuda() for part in layer.draw(dtype=dtype))

    def loss(convolve: Callable[..., Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = convolve(x, weight, None, layer.stride, layer.padding)
        return y.double().square().sum() / 64, y  # so that no sum leaves the range of float16

    def run(convolve: Callable[..., Tensor], x: Tensor, weight: Tensor) -> list[Tensor]:
        grads = torch.func.grad(lambda x, w: loss(convolve, x, w), argnums=(0, 1), has_aux=True)
        (gx, gw), y = torch.vmap(grads)(x, weight)
        return [y, gx, gw]

    with Calls() as calls:
        got = run(conv2d, x, weight)
    assert calls.names == ["convolve", "convolve_input", "convolve_weight"]
    for mine, again, want in zip(
        got, run(conv2d, x, weight), run(F.conv2d, x.double(), weight.double()), strict=True
    ):
        assert mine.dtype == dtype
        assert torch.equal(mine, again)
        assert (mine.double() - want).abs().max() <= error * want.abs().max()


@pytest.mark.gpu
@on_cuda
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="this GPU has no TMA"
)
@pytest.mark.parametrize("layer", TMA_SHAPES.values(), ids=TMA_SHAPES.keys())
def test_a_hopper_gpu_uses_the_kernels_for_tma(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    from equipoise.fast import conv_kernels_tma

    used = []
    for name in ("forward", "input_gradient", "weight_gradient"):
        kernel = getattr(conv_kernels_tma, name)
        monkeypatch.setattr(
            conv_kernels_tma, name, lambda *given, name=name, kernel=kernel: (used.append(name), kernel(*given))[1]
        )
    step(lambda x, w, *geometry: conv2d(x, w, None, *geometry), layer)(
        *(part.cuda() for part in layer.draw(dtype=torch.bfloat16))
    )
    assert used == ["forward", "input_gradient", "weight_gradient"]


@pytest.mark.gpu
@on_cuda
def test_autocast_reaches_the_kernels() -> None:
    x, weight = (part.cuda() for part in LAYERS["padded"].draw(dtype=torch.float32))

    def one(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return conv2d(x, weight, None, (1, 1), (1, 1))

    with Calls() as calls:
        y = torch.vmap(one)(x, weight)
    assert calls.names == ["convolve"]
    assert y.dtype == torch.bfloat16

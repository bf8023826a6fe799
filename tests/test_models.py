"""The networks: their published sizes and layers, gradients under vmap, and errors for wrong requests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from equipoise.core.errors import ConfigError
from equipoise.models import MODELS, build

# Small instances of every network: its name, the shape of a sample, and options that keep the test quick.
SMALL = [
    ("logistic", (5,), {}),
    ("logistic", (1, 4, 4), {}),
    ("mlp", (1, 8, 8), {"hidden": [7, 5]}),
    ("climb_cnn", (3, 16, 16), {}),
    ("climb_cnn", (1, 28, 28), {}),
    ("fedre_mnist", (1, 8, 8), {}),
    ("fedre_cifar", (3, 16, 16), {}),
    ("astraea_cnn", (1, 28, 28), {}),
    ("keras_cifar", (3, 12, 12), {}),
    ("pfl_cnn", (3, 8, 8), {}),
    ("resnet18", (3, 8, 8), {"width": 4}),
    ("resnet18", (1, 16, 16), {"width": 4, "norm": "group"}),
    ("resnet50", (3, 8, 8), {"width": 2}),
    ("resnet50", (3, 16, 16), {"width": 2, "norm": "group"}),
]


def parameters(name: str, shape: tuple[int, ...], classes: int, **options: object) -> int:
    with torch.device("meta"):  # counting allocates no memory
        return sum(leaf.numel() for leaf in build(name, shape, classes, **options).parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "count"),
    [
        ("logistic", (64,), 10, {}, 650),
        ("mlp", (1, 28, 28), 10, {}, 784 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10),
        ("climb_cnn", (3, 32, 32), 10, {}, 797_962),
        ("climb_cnn", (1, 28, 28), 10, {}, 573_578),
        ("fedre_mnist", (1, 28, 28), 10, {"pool": 1}, 86_631_390),
        ("fedre_mnist", (1, 28, 28), 10, {}, 21_735_390),
        ("fedre_cifar", (3, 32, 32), 10, {"pool": 1}, 29_546_452),
        ("fedre_cifar", (3, 32, 32), 10, {}, 1_758_420),
        ("astraea_cnn", (1, 28, 28), 47, {}, 68_873),  # the paper's own count
        ("keras_cifar", (3, 32, 32), 10, {}, 1_250_858),  # as Keras prints it
        ("pfl_cnn", (3, 32, 32), 10, {}, 1_626_442),
        ("resnet18", (3, 32, 32), 10, {}, 11_173_962),
        ("resnet18", (3, 32, 32), 10, {"norm": "group"}, 11_173_962),
        ("resnet50", (3, 32, 32), 10, {}, 23_520_842),
    ],
)
def test_networks_have_the_published_size(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, object], count: int
) -> None:
    assert parameters(name, shape, classes, **options) == count


def as_published(
    model: nn.Module, x: Tensor, act: Callable[[Tensor], Tensor], dense_act: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute the network in the order of the paper: convolution, activation, pooling, then the dense layers."""
    layers = [layer for layer in model.children() if isinstance(layer, (nn.Conv2d, nn.Linear, nn.MaxPool2d))]
    for layer, after in pairwise([*layers, None]):
        if isinstance(layer, nn.Conv2d):
            x = act(layer(x))
            x = F.max_pool2d(x, 2) if isinstance(after, nn.MaxPool2d) else x
        elif isinstance(layer, nn.Linear):
            x = layer(x.flatten(1))
            x = dense_act(x) if after is not None else x
    return x


@pytest.mark.parametrize(
    ("name", "act", "dense_act", "pools"),
    [
        ("climb_cnn", F.leaky_relu, F.leaky_relu, 2),
        ("fedre_mnist", F.relu, torch.sigmoid, 1),
        ("fedre_cifar", F.relu, torch.sigmoid, 2),
        ("keras_cifar", F.relu, F.relu, 2),
        ("pfl_cnn", F.relu, F.relu, 1),
        ("astraea_cnn", F.relu, F.relu, 0),
    ],
)
def test_networks_compute_what_the_papers_describe(
    name: str, act: Callable[[Tensor], Tensor], dense_act: Callable[[Tensor], Tensor], pools: int
) -> None:
    torch.manual_seed(1)
    model = build(name, (3, 20, 20), 4).double().eval()
    x = torch.randn(3, 3, 20, 20, dtype=torch.float64)
    assert sum(isinstance(layer, nn.MaxPool2d) for layer in model.children()) == pools
    published, ours = as_published(model, x, act, dense_act), model(x)
    torch.testing.assert_close(ours, published, rtol=1e-12, atol=1e-12)
    leaves = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), leaves),
        torch.autograd.grad(published.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_dropouts_are_where_the_papers_put_them() -> None:
    def rates(name: str) -> list[float]:
        return [layer.p for layer in build(name, (3, 28, 28), 4).modules() if isinstance(layer, nn.Dropout)]

    assert rates("astraea_cnn") == [0.5]
    assert rates("keras_cifar") == [0.25, 0.25, 0.5]
    assert rates("pfl_cnn") == [0.25, 0.5]


def test_every_model_is_exercised() -> None:
    assert {name for name, _, _ in SMALL} == set(MODELS)


@pytest.mark.parametrize(("name", "shape", "options"), SMALL)
def test_stacked_gradients_equal_those_of_each_model(
    name: str, shape: tuple[int, ...], options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    models = [build(name, shape, 3, **options).double().eval() for _ in range(2)]
    x, y = torch.randn(2, 4, *shape, dtype=torch.float64), torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]])
    weights, buffers = stack_module_state(models)

    def loss(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = functional_call(models[0], (params, buffers), (x,))
        return F.cross_entropy(outputs, y)

    stacked = vmap(grad(loss))(weights, buffers, x, y)
    for i, model in enumerate(models):
        outputs = model(x[i])
        assert outputs.shape == (4, 3)
        keys, leaves = zip(*model.named_parameters(), strict=True)
        alone = torch.autograd.grad(F.cross_entropy(outputs, y[i]), leaves)
        for key, gradient in zip(keys, alone, strict=True):
            torch.testing.assert_close(stacked[key][i], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "shape", "options"), SMALL)
def test_nothing_works_in_place_and_training_mode_is_on(
    name: str, shape: tuple[int, ...], options: dict[str, object]
) -> None:
    for module in build(name, shape, 3, **options).modules():
        assert module.training
        assert not getattr(module, "inplace", False)


def test_building_draws_only_the_initialisation() -> None:
    torch.manual_seed(3)
    first = build("astraea_cnn", (1, 28, 28), 5)  # has a dropout, which must draw nothing while shapes are inferred
    torch.manual_seed(3)
    second: list[nn.Module] = [nn.Conv2d(1, 12, 5), nn.Conv2d(12, 18, 3), nn.Conv2d(18, 24, 2)]
    second += [nn.Linear(384, 150), nn.Linear(150, 5)]
    ours = list(first.parameters())
    theirs = [leaf for module in second for leaf in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_norm_and_activation_are_as_asked() -> None:
    kinds = {type(module) for module in build("resnet18", (3, 8, 8), 2, width=4, norm="group").modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
    assert any(isinstance(layer, nn.Tanh) for layer in build("mlp", (3,), 2, activation="tanh").modules())
    slopes = [m.negative_slope for m in build("mlp", (3,), 2).modules() if isinstance(m, nn.LeakyReLU)]
    assert slopes == [0.01, 0.01]


@pytest.mark.parametrize(
    ("name", "shape", "options", "sentence"),
    [
        ("resnet", (3, 8, 8), {}, r"no model 'resnet': did you mean 'resnet\d\d'\?"),
        ("zzz", (3, 8, 8), {}, "the choices are astraea_cnn, climb_cnn"),
        ("mlp", (4,), {"hiden": [3]}, "model 'mlp' has no option 'hiden': did you mean 'hidden'"),
        ("logistic", (4,), {"width": 3}, "model 'logistic' has no option 'width': it has no options"),
        ("mlp", (4,), {"hidden": 3}, r"hidden is 3; expected a list of widths such as \[128, 128\]"),
        ("mlp", (4,), {"hidden": [3, 0]}, "hidden is 0; expected an integer of at least 1"),
        ("mlp", (4,), {"hidden": [True]}, "hidden is True; expected an integer"),
        ("mlp", (4,), {"activation": "rellu"}, "activation is 'rellu': did you mean 'relu'"),
        ("mlp", (4,), {"activation": ["relu"]}, r"activation is \['relu'\]: "),
        ("resnet18", (3, 8, 8), {"norm": "bath"}, "norm is 'bath': did you mean 'batch'"),
        ("resnet18", (3, 8, 8), {"width": 0}, "width is 0; expected an integer of at least 1"),
        ("fedre_mnist", (1, 8, 8), {"pool": 0}, "pool is 0; expected an integer of at least 1"),
        (
            "climb_cnn",
            (30,),
            {},
            r"'climb_cnn' takes images .* but a sample has shape \(30,\); use 'logistic'",
        ),
        ("resnet50", (30,), {}, "'resnet50' takes images"),
        ("climb_cnn", (3, 8, 8), {}, "'climb_cnn' needs larger images: 8 x 8 pixels shrink to nothing"),
        ("keras_cifar", (3, 4, 4), {}, "'keras_cifar' needs larger images: 4 x 4"),
    ],
)
def test_a_wrong_request_is_one_sentence(
    name: str, shape: tuple[int, ...], options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        build(name, shape, 3, **options)
    assert "\n" not in str(caught.value)


OWN = """
from torch import nn

def plain():
    return nn.Linear(2, 2)

def sized(shape, classes, depth=1):
    return nn.Sequential(*[nn.Linear(shape[0], shape[0]) for _ in range(depth)], nn.Linear(shape[0], classes))

def open_ended(**given):
    return nn.Linear(given["shape"][0], given["classes"] * given.get("times", 1))

def number():
    return 3

def broken(shape):
    raise RuntimeError("out of ideas")

constant = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets_of_mine.py").write_text(OWN)
    (tmp_path / "needs_more.py").write_text("import a_module_nobody_has\n")
    (tmp_path / "garbled.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    for name in ("nets_of_mine", "needs_more", "garbled"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.usefixtures("own")
def test_a_function_of_the_users_own_gets_what_it_accepts() -> None:
    path = list(sys.path)
    assert isinstance(build("nets_of_mine:plain", (4,), 3), nn.Linear)
    model = build("nets_of_mine:sized", (4,), 3, depth=2)
    assert [layer.out_features for layer in model if isinstance(layer, nn.Linear)] == [4, 4, 3]  # type: ignore[attr-defined]
    assert build("nets_of_mine:open_ended", (4,), 3, times=2).out_features == 6
    assert sys.path == path


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("nowhere.at_all:f", {}, "the module 'nowhere', which is neither in .* nor installed"),
        ("nets_of_mine:sizd", {}, "'nets_of_mine' has no 'sizd'; did you mean 'sized'"),
        ("nets_of_mine:constant", {}, "'nets_of_mine' has no 'constant'"),
        ("nets_of_mine:number", {}, "returned a int; expected a torch.nn.Module"),
        ("nets_of_mine:broken", {}, "could not be built: RuntimeError: out of ideas"),
        ("nets_of_mine:sized", {"dept": 1}, "has no option 'dept': did you mean 'depth'"),
        ("nets_of_mine:plain", {"depth": 1}, "has no option 'depth': it has no options"),
        ("nets_of_mine:", {}, "incomplete; expected 'package.module:Name'"),
        (":f", {}, "incomplete; expected 'package.module:Name'"),
        ("needs_more:f", {}, "importing 'needs_more' failed with ModuleNotFoundError: .*a_module_nobody_has"),
        ("garbled:f", {}, "importing 'garbled' failed with SyntaxError"),
    ],
)
def test_a_missing_function_is_one_sentence(name: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build(name, (4,), 3, **options)

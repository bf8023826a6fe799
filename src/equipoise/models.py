"""The networks of the papers, and networks of the user's own by "package.module:function".

Every network is a plain `torch.nn.Module` with PyTorch's default initialisation. It is called through
`torch.func.functional_call` under `vmap`. Therefore no layer works in place, and randomness and running statistics
occur only in `nn.Dropout` and `nn.BatchNorm2d`, which training replaces by keyed and masked layers. If max-pooling
follows a monotone activation, the network pools first: the result is the same, and the activation is applied to a
quarter of the numbers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from equipoise.core import references
from equipoise.core.errors import ConfigError, EquipoiseError, nearest

Shape = tuple[int, ...]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


def logistic(shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: Shape, classes: int, hidden: Sequence[int] = (128, 128), activation: str = "leaky_relu") -> nn.Module:
    """A fully connected network; the defaults are CLIMB's network for MNIST (Shen et al., 2022)."""
    if not isinstance(hidden, (list, tuple)):
        raise ConfigError(f"model option hidden is {hidden!r}; expected a list of widths such as [128, 128]")
    act = ACTIVATIONS[_choice("activation", activation, ACTIVATIONS)]
    widths = [math.prod(shape), *(_positive("hidden", width) for width in hidden)]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def climb_cnn(shape: Shape, classes: int) -> nn.Module:
    """CLIMB's network for CIFAR-10 and Fashion-MNIST.

    The paper prints 394 units in the first dense layer; its code, like FedDyn's before it, has 384.
    """
    layers = [
        nn.Conv2d(shape[0], 64, 5),
        *_pool(2, nn.LeakyReLU()),
        nn.Conv2d(64, 64, 5),
        *_pool(2, nn.LeakyReLU()),
    ]
    return _cnn("climb_cnn", shape, *layers, nn.Flatten(), 384, nn.LeakyReLU(), 192, nn.LeakyReLU(), classes)


def fedre_mnist(shape: Shape, classes: int, pool: int = 2) -> nn.Module:
    """FedRE's network for MNIST: one convolution, then two sigmoid layers.

    The paper names no pooling. Without it (`pool=1`, the network as printed) the first dense layer alone
    has 26 x 26 x 128 x 1000 weights, and the network 86.6 million parameters; with `pool=2` it has 21.7 million.
    """
    layers = [nn.Conv2d(shape[0], 128, 3), *_pool(pool, nn.ReLU()), nn.Flatten()]
    return _cnn("fedre_mnist", shape, *layers, 1000, nn.Sigmoid(), 100, nn.Sigmoid(), classes)


def fedre_cifar(shape: Shape, classes: int, pool: int = 2) -> nn.Module:
    """FedRE's network for CIFAR-10: two convolutions, then two sigmoid layers (394 units, as printed).

    The paper names no pooling; `pool=1` is the network as printed, with 29.5 million parameters.
    """
    layers = [nn.Conv2d(shape[0], 128, 5), *_pool(pool, nn.ReLU())]
    layers += [nn.Conv2d(128, 128, 5), *_pool(pool, nn.ReLU()), nn.Flatten()]
    return _cnn("fedre_cifar", shape, *layers, 394, nn.Sigmoid(), 192, nn.Sigmoid(), classes)


def astraea_cnn(shape: Shape, classes: int) -> nn.Module:
    """Astraea's network for EMNIST: 68,873 parameters for 47 classes of 28 x 28 pixels, as the paper counts.

    The paper does not mention padding; without any, the network has exactly that number of parameters. The paper
    names an activation only for the dense layer; here the convolutions have the same one.
    """
    layers = [nn.Conv2d(shape[0], 12, 5, stride=2), nn.ReLU(), nn.Conv2d(12, 18, 3, stride=2), nn.ReLU()]
    layers += [nn.Dropout(0.5), nn.Conv2d(18, 24, 2), nn.ReLU(), nn.Flatten()]
    return _cnn("astraea_cnn", shape, *layers, 150, nn.ReLU(), classes)


def keras_cifar(shape: Shape, classes: int) -> nn.Module:
    """The small CIFAR-10 network of the Keras examples, which Astraea trains on CINIC-10."""
    layers: list[nn.Module] = []
    for before, after in ((shape[0], 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3)]
        layers += [*_pool(2, nn.ReLU()), nn.Dropout(0.25)]
    return _cnn("keras_cifar", shape, *layers, nn.Flatten(), 512, nn.ReLU(), nn.Dropout(0.5), classes)


def pfl_cnn(shape: Shape, classes: int) -> nn.Module:
    """The small CIFAR-10 network of pfl-research's benchmarks (there with Glorot initialisation)."""
    layers = [nn.Conv2d(shape[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), *_pool(2, nn.ReLU())]
    layers += [nn.Dropout(0.25), nn.Flatten()]
    return _cnn("pfl_cnn", shape, *layers, 128, nn.ReLU(), nn.Dropout(0.5), classes)


def resnet18(shape: Shape, classes: int, norm: str = "batch", width: int = 64) -> nn.Module:
    """ResNet-18 (He et al., 2016) with a CIFAR stem: a 3 x 3 convolution and no max-pooling."""
    return _resnet("resnet18", shape, classes, _basic, (2, 2, 2, 2), 1, norm, width)


def resnet50(shape: Shape, classes: int, norm: str = "batch", width: int = 64) -> nn.Module:
    """ResNet-50 (He et al., 2016) with a CIFAR stem: a 3 x 3 convolution and no max-pooling."""
    return _resnet("resnet50", shape, classes, _bottleneck, (3, 4, 6, 3), 4, norm, width)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "climb_cnn": climb_cnn,
    "fedre_mnist": fedre_mnist,
    "fedre_cifar": fedre_cifar,
    "astraea_cnn": astraea_cnn,
    "keras_cifar": keras_cifar,
    "pfl_cnn": pfl_cnn,
    "resnet18": resnet18,
    "resnet50": resnet50,
}


def build(name: str, shape: Shape, classes: int, **options: object) -> nn.Module:
    """Build the network `name` for samples of `shape`, (channels, height, width) or (features,).

    `name` is a key of `MODELS`, or "package.module:function" of the user's own, which may lie in the working
    directory. The user's function is called with the options, and with `shape=` and `classes=` if it accepts them.

    >>> build("mlp", (1, 28, 28), 10, hidden=[64])[1]
    Linear(in_features=784, out_features=64, bias=True)
    """
    if ":" in name:
        return _own(name, {"shape": shape, "classes": classes}, options)
    if name not in MODELS:
        raise ConfigError(f"there is no model '{name}': {nearest(name, MODELS)}")
    _refuse_unknown(name, options, set(inspect.signature(MODELS[name]).parameters) - {"shape", "classes"})
    return MODELS[name](shape, classes, **options)


def kind(name: str, shape: Shape, classes: int, **options: object) -> Hashable | None:
    """Return a key that is equal for networks that differ only in the values of their parameters.

    For the user's own code it is None, since nothing is known about the network.
    """
    return None if ":" in name else (name, tuple(shape), classes, repr(sorted(options.items())))


def _own(name: str, given: dict[str, object], options: dict[str, object]) -> nn.Module:
    function = references.load("model", name)
    try:
        parameters = inspect.signature(function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {key: value for key, value in given.items() if key in parameters}
            _refuse_unknown(name, options, set(parameters) - {"shape", "classes"})
        model = function(**given, **options)
    except EquipoiseError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"model '{name}' could not be built: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model '{name}' returned a {type(model).__name__}; expected a torch.nn.Module")
    return model


def _refuse_unknown(name: str, options: dict[str, object], accepted: set[str]) -> None:
    for option in options.keys() - accepted:
        hint = nearest(option, accepted) if accepted else "it has no options"
        raise ConfigError(f"model '{name}' has no option '{option}': {hint}")


def _cnn(name: str, shape: Shape, *layers: nn.Module | int) -> nn.Module:
    """Chain the layers; a number stands for a dense layer of that many units, whose input width is inferred."""
    _require_image(name, shape)
    modules: list[nn.Module] = []
    x = torch.zeros(1, *shape)
    try:
        for layer in layers:
            module = nn.Linear(x.shape[1], layer) if isinstance(layer, int) else layer
            with torch.no_grad():
                x = module.eval()(x)  # in evaluation mode, so that dropout draws no random numbers
            modules.append(module.train())
    except RuntimeError as error:
        size = f"{shape[1]} x {shape[2]}"
        raise ConfigError(f"model '{name}' needs larger images: {size} pixels shrink to nothing inside") from error
    return nn.Sequential(*modules)


def _require_image(name: str, shape: Shape) -> None:
    if len(shape) != 3:
        raise ConfigError(
            f"model '{name}' takes images (channels, height, width), but a sample has shape {shape}; "
            "use 'logistic' or 'mlp'"
        )


def _pool(size: int, activation: nn.Module) -> list[nn.Module]:
    return [activation] if _positive("pool", size) == 1 else [nn.MaxPool2d(size), activation]


def _positive(option: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model option {option} is {value!r}; expected an integer of at least 1")
    return value


def _choice(option: str, value: str, choices: Collection[str]) -> str:
    if value not in list(choices):  # a list, so that an unhashable value is refused with the same sentence
        raise ConfigError(f"model option {option} is {value!r}: {nearest(value, choices)}")
    return value


class _Residual(nn.Module):
    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


class _GlobalAverage(nn.Module):
    """The mean over the image; the backward pass of torch's adaptive pooling is not deterministic on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


def _resnet(
    name: str,
    shape: Shape,
    classes: int,
    body: Callable[[int, int, int, str], list[nn.Module]],
    depths: tuple[int, ...],
    expansion: int,
    norm: str,
    width: int,
) -> nn.Module:
    _choice("norm", norm, ("batch", "group"))
    _require_image(name, shape)
    inner = channels = _positive("width", width)
    layers = [*_conv(shape[0], channels, 3, 1, norm), nn.ReLU()]
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            outer = inner * expansion
            same = stride == 1 and channels == outer
            shortcut = nn.Identity() if same else nn.Sequential(*_conv(channels, outer, 1, stride, norm))
            layers.append(_Residual(nn.Sequential(*body(channels, inner, stride, norm)), shortcut))
            channels = outer
        inner *= 2
    return nn.Sequential(*layers, _GlobalAverage(), nn.Linear(channels, classes))


def _basic(before: int, inner: int, stride: int, norm: str) -> list[nn.Module]:
    return [*_conv(before, inner, 3, stride, norm), nn.ReLU(), *_conv(inner, inner, 3, 1, norm)]


def _bottleneck(before: int, inner: int, stride: int, norm: str) -> list[nn.Module]:
    return [
        *_conv(before, inner, 1, 1, norm),
        nn.ReLU(),
        *_conv(inner, inner, 3, stride, norm),
        nn.ReLU(),
        *_conv(inner, inner * 4, 1, 1, norm),
    ]


def _conv(before: int, after: int, kernel: int, stride: int, norm: str) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(after) if norm == "batch" else nn.GroupNorm(_groups(after), after)]


def _groups(channels: int) -> int:
    """Wu and He's 32 groups; fewer in a narrow network, so that a group has at least two channels."""
    return math.gcd(32, channels // 2) if channels % 2 == 0 else 1

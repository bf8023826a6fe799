"""A module as a pure function: masked batch norm, keyed dropout, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equipoise.core import random
from equipoise.core.errors import ConfigError
from equipoise.core.network import Context, Network
from equipoise.core.tree import Tree

KEY = random.bits(1)


def context(real: int, size: int, train: bool = True, key: Tensor = KEY) -> Context:
    return Context(torch.arange(size) < real, key, train)


def doubled(network: Network) -> tuple[Tree, Tree]:
    """The network's own parameters and buffers, in float64."""

    def double(leaf: Tensor) -> Tensor:
        return leaf.double() if leaf.is_floating_point() else leaf

    return {k: double(p) for k, p in network.params.items()}, {k: double(b) for k, b in network.buffers.items()}


def samples(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3 + 1


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "1d with length": (lambda: nn.BatchNorm1d(3), (3, 5)),
    "2d": (lambda: nn.BatchNorm2d(3), (3, 4, 2)),
    "3d": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 2)),
    "not affine": (lambda: nn.BatchNorm2d(3, affine=False), (3, 4, 2)),
    "cumulative mean": (lambda: nn.BatchNorm1d(3, momentum=None), (3,)),
    "slow, wide": (lambda: nn.BatchNorm2d(3, momentum=0.02, eps=0.1), (3, 4, 2)),
    "no statistics kept": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 4, 2)),
}


@pytest.mark.parametrize(("make", "shape"), NORMS.values(), ids=NORMS.keys())
def test_masked_batch_norm_equals_torch_on_the_true_short_batch(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch_norm = make().double()
    for p in torch_norm.parameters():
        nn.init.uniform_(p, 0.5, 2.0)
    network = Network(torch_norm)
    params, buffers = doubled(network)
    for step, real in enumerate((4, 2, 7, 3)):  # statistics of several batches in a row
        x = samples(7, *shape, seed=step)
        padded = torch.where(torch.arange(7).view(-1, *[1] * len(shape)) < real, x, 1e6)
        outputs, buffers = network(params, buffers, padded, context(real, 7))
        torch.testing.assert_close(outputs[:real], torch_norm(x[:real]), rtol=1e-12, atol=1e-12)
        for name, value in torch_norm.named_buffers():
            torch.testing.assert_close(buffers[name], value, rtol=1e-12, atol=1e-12)
    x = samples(5, *shape, seed=9)
    outputs, same = network(params, buffers, x, context(5, 5, train=False))
    torch.testing.assert_close(outputs, torch_norm.eval()(x), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(same[name], buffers[name]) for name in buffers)


def test_gradients_of_masked_batch_norm_equal_torchs() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    network = Network(module)
    x = samples(6, 4)
    padded = torch.cat([x[:4], torch.full((2, 4), 1e6, dtype=torch.float64)])
    mask = torch.arange(6) < 4

    def loss(params: Tree) -> Tensor:
        outputs, _ = network(params, doubled(network)[1], padded, Context(mask, KEY, True))
        return torch.where(mask[:, None], outputs.square(), 0).sum()

    grads = torch.func.grad(loss)(doubled(network)[0])
    module(x[:4]).square().sum().backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_of_one_uses_running_statistics_and_leaves_them(momentum: float | None) -> None:
    network = Network(nn.BatchNorm1d(3, momentum=momentum))
    params, buffers = doubled(network)
    _, buffers = network(params, buffers, samples(4, 3), context(4, 4))
    x = samples(4, 3, seed=5)
    outputs, after = network(params, buffers, x, context(1, 4))
    expected, _ = network(params, buffers, x, context(4, 4, train=False))
    torch.testing.assert_close(outputs[:1], expected[:1], rtol=1e-12, atol=1e-12)
    assert torch.equal(after["running_mean"], buffers["running_mean"])
    assert torch.equal(after["running_var"], buffers["running_var"])


def test_a_batch_of_one_does_not_slow_a_cumulative_mean() -> None:
    """It adds nothing to the mean, so that it must not be counted either."""
    network = Network(nn.BatchNorm1d(3, momentum=None))
    params, buffers = doubled(network)
    x = samples(4, 3)
    _, alone = network(params, buffers, x, context(1, 4))
    _, after = network(params, alone, x, context(4, 4))
    torch.testing.assert_close(after["running_mean"], x.mean(0), rtol=1e-12, atol=1e-12)


def test_a_single_image_has_statistics_of_its_own() -> None:
    norm = nn.BatchNorm2d(3).double()
    network = Network(norm)
    x = samples(1, 3, 4, 4)
    outputs, _ = network(*doubled(network), x, context(1, 1))
    torch.testing.assert_close(outputs, norm(x), rtol=1e-12, atol=1e-12)


def test_half_precision_inputs_keep_float_statistics() -> None:
    network = Network(nn.BatchNorm1d(3))
    outputs, buffers = network(network.params, network.buffers, samples(8, 3).bfloat16(), context(8, 8))
    assert outputs.dtype == torch.bfloat16
    assert buffers["running_mean"].dtype == torch.float32


def test_buffers_are_returned_and_nothing_is_mutated() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    before = copy.deepcopy(module.state_dict())
    network = Network(module)
    held = {name: value.clone() for name, value in network.buffers.items()}
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    one, moved = network(network.params, network.buffers, x, context(5, 5))
    two, again = network(network.params, network.buffers, x, context(5, 5))
    assert torch.equal(one, two)
    assert all(torch.equal(moved[k], again[k]) for k in moved)
    assert not torch.equal(moved["1.running_mean"], held["1.running_mean"])
    assert all(torch.equal(network.buffers[k], held[k]) for k in held)
    assert all(torch.equal(module.state_dict()[k], before[k]) for k in before)
    assert moved.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_the_callers_module_is_left_alone() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    network = Network(module)
    assert isinstance(module[0], nn.BatchNorm1d)
    assert isinstance(module[1], nn.Dropout)
    network.params["0.weight"] += 1
    assert torch.equal(module[0].weight, torch.ones(3))


# -- how images lie in memory


class Seen(nn.Module):
    """Notes how far apart in memory the channels of a pixel lie."""

    def __init__(self) -> None:
        super().__init__()
        self.apart: list[int] = []

    def __deepcopy__(self, memo: object) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.apart.append(x.stride(1))
        return x


@pytest.mark.parametrize("train", [True, False])
def test_convolutions_on_cpu_have_the_channels_last(train: bool) -> None:
    torch.manual_seed(0)
    seen, last = Seen(), nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    module = nn.Sequential(seen, nn.Conv2d(3, 4, 3), seen, nn.BatchNorm2d(4), nn.ReLU(), seen, last).double()
    network = Network(module)
    x = samples(5, 3, 6, 6)
    network.check(x, 2)
    seen.apart.clear()
    outputs, _ = network(*doubled(network), x, context(5, 5, train))
    assert seen.apart == [1, 1, 1]
    torch.testing.assert_close(outputs, module.train(train)(x), rtol=1e-12, atol=1e-12)


def test_without_convolutions_images_stay_as_they_are() -> None:
    seen = Seen()
    network = Network(nn.Sequential(seen, nn.Flatten(), nn.Linear(108, 2)))
    x = samples(5, 3, 6, 6).float()
    network.check(x, 2)
    network(network.params, network.buffers, x, context(5, 5))
    assert set(seen.apart) == {36}


class Viewing(nn.Module):
    """It relies on how the outputs of a convolution lie in memory, as many models do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def test_a_model_that_cannot_have_the_channels_last_keeps_them_where_they_are() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), Viewing(), nn.Linear(64, 2)).double()
    network = Network(module)
    x = samples(5, 3, 6, 6)
    network.check(x, 2)
    outputs, _ = network(*doubled(network), x, context(5, 5))
    torch.testing.assert_close(outputs, module(x), rtol=1e-12, atol=1e-12)


# -- dropout


def dropped(network: Network, x: Tensor, key: Tensor = KEY, train: bool = True) -> Tensor:
    outputs, _ = network(network.params, network.buffers, x, context(len(x), len(x), train, key))
    return outputs


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 1.0])
def test_dropout_drops_its_share_and_scales_the_rest(p: float) -> None:
    outputs = dropped(Network(nn.Dropout(p)), torch.ones(100, 400))
    share = (outputs == 0).float().mean().item()
    assert abs(share - p) <= 5 * (p * (1 - p) / 40_000) ** 0.5
    if p < 1:
        torch.testing.assert_close(outputs[outputs != 0], torch.full_like(outputs[outputs != 0], 1 / (1 - p)))


def test_dropout_is_off_in_evaluation() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(dropped(Network(nn.Dropout(0.5)), x, train=False), x)


@pytest.mark.parametrize(("layer", "shape"), [(nn.Dropout(0.5), (6, 9)), (nn.Dropout2d(0.5), (8, 3, 3))])
def test_dropout_does_not_depend_on_padding(layer: nn.Module, shape: tuple[int, ...]) -> None:
    network = Network(layer)
    x = torch.ones(7, *shape)
    assert torch.equal(dropped(network, x)[:3], dropped(network, x[:3]))


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Dropout1d, (5, 8)), (nn.Dropout2d, (5, 4, 4)), (nn.Dropout3d, (5, 2, 2, 2))]
)
def test_channel_dropout_drops_whole_channels(layer: type[nn.Module], shape: tuple[int, ...]) -> None:
    outputs = dropped(Network(layer(0.5)), torch.ones(40, *shape)).flatten(2)
    assert torch.equal(outputs.amin(-1), outputs.amax(-1))
    assert 0.3 < (outputs == 0).float().mean() < 0.7


class Twice(nn.Module):
    """One dropout module at work in two places, as many models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.drop(x), self.drop(x)], 1)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), id="two layers"),
        pytest.param(nn.Sequential(*[nn.Dropout(0.5)] * 2), id="one layer, listed twice"),
    ],
)
def test_layers_drop_independently(module: nn.Module) -> None:
    kept = (dropped(Network(module), torch.ones(50, 200)) != 0).float().mean().item()
    assert abs(kept - 0.25) < 5 * (0.25 * 0.75 / 10_000) ** 0.5


def test_a_layer_used_twice_drops_independently() -> None:
    first, second = (dropped(Network(Twice()), torch.ones(50, 200)) == 0).chunk(2, 1)
    assert abs((first == second).float().mean().item() - 0.5) < 5 * (0.25 / 10_000) ** 0.5


def test_a_key_is_a_mask() -> None:
    network, x = Network(nn.Dropout(0.5)), torch.ones(50, 200)
    assert torch.equal(dropped(network, x), dropped(network, x))
    other = dropped(network, x, random.fold(KEY, 1))
    assert abs((other == dropped(network, x)).float().mean().item() - 0.5) < 5 * (0.25 / 10_000) ** 0.5


def test_dropout_under_vmap_equals_one_by_one() -> None:
    network = Network(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.4), nn.Linear(5, 2)))
    keys, x = random.bits(0, torch.arange(3)), torch.randn(3, 4, 6)
    stacked = torch.vmap(lambda key, some: dropped(network, some, key))(keys, x)
    alone = torch.stack([dropped(network, some, key) for key, some in zip(keys, x, strict=True)])
    torch.testing.assert_close(stacked, alone)


# -- models with shared and frozen parts


def test_a_shared_norm_layer_stays_shared() -> None:
    norm = nn.BatchNorm1d(4)
    network = Network(nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), norm))
    _, buffers = network(network.params, network.buffers, torch.randn(6, 4), context(6, 6))
    assert [k for k in network.params if k.startswith("3")] == []
    assert buffers["1.num_batches_tracked"].item() == 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(x))
        return outputs


def test_tied_weights_are_one_parameter() -> None:
    network = Network(Tied())
    assert list(network.params) == ["first.weight"]
    weight = torch.randn(4, 4)
    outputs, _ = network({"first.weight": weight}, {}, torch.eye(4), context(4, 4))
    torch.testing.assert_close(outputs, (weight @ weight).T)


def test_frozen_parameters_are_not_trained() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    network = Network(module)
    assert list(network.params) == ["1.weight", "1.bias"]
    assert list(network.buffers) == ["0.weight", "0.bias"]
    x = torch.randn(5, 4)
    outputs, buffers = network(network.params, network.buffers, x, context(5, 5))
    torch.testing.assert_close(outputs, module(x).detach())
    assert torch.equal(buffers["0.weight"], module[0].weight)


# -- what is refused


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 4, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.gru(x[:, None])[0][:, 0])
        return outputs


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs + 0.1 * torch.randn_like(outputs)


RANDOM_MODELS = [
    (nn.Sequential(nn.Linear(5, 3), nn.AlphaDropout(0.2)), r"model: 1 \(AlphaDropout\)"),
    (nn.Sequential(nn.Linear(5, 3), nn.Softplus(), nn.RReLU()), r"model: 2 \(RReLU\)"),
    (nn.Sequential(nn.Sequential(nn.Linear(5, 3), nn.FeatureAlphaDropout(0.2))), r"model: 0\.1 \(Feature"),
    (Recurrent(), r"model: gru \(GRU\)"),
    (Noisy(5, 3), r"model: the model \(Noisy\)"),
]


@pytest.mark.parametrize(("module", "named"), RANDOM_MODELS, ids=[m[1] for m in RANDOM_MODELS])
def test_a_model_that_draws_from_torchs_generator_is_refused_by_name(module: nn.Module, named: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(ConfigError, match=rf"{named}.* draws from torch's own generator"):
        Network(module).check(torch.randn(2, 5, generator=torch.Generator().manual_seed(0)), 3)
    assert torch.equal(torch.get_rng_state(), state)


GOOD_MODELS = [
    nn.Linear(5, 3),
    nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)),
    nn.Sequential(nn.Linear(5, 3), *[nn.Dropout(0.5)] * 2),
    nn.BatchNorm1d(5),
    nn.Linear(5, 3).double(),
]


@pytest.mark.parametrize("module", GOOD_MODELS, ids=["linear", "layers", "shared", "norm alone", "double"])
def test_a_good_model_passes(module: nn.Module) -> None:
    network = Network(module)
    buffers = {name: value.clone() for name, value in network.buffers.items()}
    network.check(torch.randn(2, 5), 5 if isinstance(module, nn.BatchNorm1d) else 3)
    assert all(torch.equal(network.buffers[name], value) for name, value in buffers.items())


def test_a_wrong_output_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"outputs of shape \(2, 4\) for 2 samples, expected \(2, 3\)"):
        Network(nn.Linear(5, 4)).check(torch.randn(2, 5), 3)


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_a_model_that_gives_no_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model: it gives a tuple, expected a tensor of shape \(2, 5\)"):
        Network(Pair(5, 5)).check(torch.randn(2, 5), 5)


@pytest.mark.parametrize("module", [nn.Flatten(), nn.Linear(5, 3).requires_grad_(False)], ids=["none", "frozen"])
def test_a_model_without_parameters_is_refused(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        Network(module).check(torch.randn(2, 5), 3)


WRONG_INPUTS = [
    (nn.Linear(4, 3), (5,)),
    (nn.Conv2d(3, 8, 3), (1, 6, 6)),
    (nn.BatchNorm2d(3), (5,)),
    (nn.Sequential(nn.Flatten(2), nn.Linear(4, 3)), (5,)),
]


@pytest.mark.parametrize(("module", "shape"), WRONG_INPUTS, ids=["linear", "conv", "norm", "flatten"])
def test_a_wrong_input_shape_is_refused(module: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"model: it cannot take samples of shape \(.*\): "):
        Network(module).check(torch.randn(2, *shape), 3)

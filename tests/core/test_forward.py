"""More forward passes at a client: a teacher, features, a tap that changes them, and a gradient elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Env
from equipoise.core.errors import ConfigError
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.network import Context, Network
from equipoise.core.round import one_round, start
from equipoise.core.tree import Tree
from equipoise.core.turn import State
from equipoise.engines import Serial
from equipoise.engines.stacked import Stacked
from equipoise.models import build
from equipoise.testing import contract
from equipoise.testing.contract import compare
from equipoise.testing.federations import dropout_cnn, federation, image_federation, linear, norm_cnn


def play(fed: contract.Federation, method: Method, rounds: int = 2) -> State:
    engine, chain = Stacked(fed, precision="float64", width=3), Chain(method)
    state = start(fed, chain, engine)
    for _ in range(rounds):
        state, _ = one_round(state, fed, chain, engine)
    return state


# -- the head


class Twice(nn.Module):
    """Its last layer is used for something else, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


class Scaled(nn.Module):
    """Something comes after its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)


@pytest.mark.parametrize(
    ("module", "shape", "head"),
    [
        (nn.Linear(3, 3), (3,), ""),
        (linear(5, 3), (5,), "2"),
        (norm_cnn(), (1, 6, 6), "6"),
        (build("resnet18", (3, 16, 16), 3, width=8), (3, 16, 16), "12"),
        (nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(-1)), (3,), None),
        (Twice(), (3,), None),
        (Scaled(), (3,), None),
    ],
    ids=["a layer", "mlp", "cnn", "resnet18", "softmax after it", "used twice", "scaled"],
)
def test_the_head_gives_the_output_of_the_model(module: nn.Module, shape: tuple[int, ...], head: str) -> None:
    network = Network(module)
    network.find_head(shape)
    assert network.head == head


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("module", [norm_cnn, dropout_cnn])
def test_a_split_call_gives_the_same_bits(module: type[nn.Module], train: bool) -> None:
    network = Network(module())
    network.find_head((1, 6, 6))
    x, context = torch.randn(4, 1, 6, 6), Context(torch.ones(4, dtype=torch.bool), torch.tensor(7), train)
    whole, buffers = network(network.params, network.buffers, x, context)
    outputs, features, same = network.split(network.params, network.buffers, x, context, lambda u: u)
    assert torch.equal(outputs, whole)
    assert features.dim() == 2
    compare(buffers, same, 0)


# -- taps


@dataclass(frozen=True)
class Pushes(Method):
    """Adds a constant to what the head reads."""

    push: float = 0.0
    name = "pushes"

    def features(self, features: Tensor, env: Env) -> Tensor:
        return features + self.push


@dataclass(frozen=True)
class Decays(Method):
    """A penalty on the size of the features."""

    by: float = 0.1
    name = "decays"
    needs_features = True

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        assert env.features is not None
        return losses + self.by * env.features.square().sum(-1)


@dataclass(frozen=True)
class Sharpness(Method):
    """FedSAM: the gradient where the loss is higher."""

    rho: float = 0.05
    name = "sharpness"

    def grads(self, grads: Tree, env: Env) -> Tree:
        assert env.gradient is not None
        return env.gradient(tree.axpy(self.rho / (tree.norm(grads) + 1e-12), grads, env.params))


@dataclass(frozen=True)
class Looks(Method):
    """A second forward pass in training mode, whose effect on the buffers is discarded."""

    name = "looks"

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        return losses + 0 * env.forward(env.params, train=True)[0].sum()


def test_a_tap_that_adds_nothing_changes_no_bit() -> None:
    fed = federation()
    compare(play(fed, Pushes(0.0)).params, play(fed, FedAvg()).params, 0)


def test_features_are_what_the_head_reads() -> None:
    """A penalty on them equals one written into the model, step by step, with torch alone."""
    torch.manual_seed(1)
    module = linear()
    fed = federation(module, sizes=(8,), cohort=0, local=Local(lr=0.1, batch="full", epochs=3))
    got = play(fed, Decays(0.2) + Pushes(0.3), 1).params
    copied = linear().double()
    copied.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    optimiser = torch.optim.SGD(copied.parameters(), lr=0.1)
    x, y = fed.x[fed.indices].double(), fed.y[fed.indices]
    for _ in range(3):
        optimiser.zero_grad()
        features = copied[1](copied[0](x)) + 0.3
        loss = nn.functional.cross_entropy(copied[2](features), y) + 0.2 * features.square().sum(-1).mean()
        loss.backward()
        optimiser.step()
    compare(got, {name: value.detach() for name, value in copied.named_parameters()}, 1e-12)


def test_a_gradient_elsewhere_is_that_of_the_whole_objective() -> None:
    torch.manual_seed(1)
    module = linear()
    fed = federation(module, sizes=(8,), cohort=0, local=Local(lr=0.1, batch="full", epochs=2))
    got = play(fed, Sharpness(0.1), 1).params
    copied = linear().double()
    copied.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    x, y = fed.x[fed.indices].double(), fed.y[fed.indices]
    for _ in range(2):
        own = [p.detach().clone() for p in copied.parameters()]
        first = torch.autograd.grad(nn.functional.cross_entropy(copied(x), y), list(copied.parameters()))
        norm = torch.sqrt(sum((g.square().sum() for g in first), torch.zeros(())))
        with torch.no_grad():
            for p, g in zip(copied.parameters(), first, strict=True):
                p += 0.1 * g / (norm + 1e-12)
        second = torch.autograd.grad(nn.functional.cross_entropy(copied(x), y), list(copied.parameters()))
        with torch.no_grad():
            for p, before, g in zip(copied.parameters(), own, second, strict=True):
                p.copy_(before - 0.1 * g)
    compare(got, {name: value.detach() for name, value in copied.named_parameters()}, 1e-12)


def test_a_second_pass_in_training_mode_leaves_the_buffers_alone() -> None:
    torch.manual_seed(4)
    fed = image_federation(norm_cnn())
    one, other = play(fed, Looks()), play(fed, FedAvg())
    compare(one.buffers, other.buffers, 1e-12)
    compare(one.params, other.params, 1e-12)


@pytest.mark.parametrize("method", [Pushes(0.2), Decays(), Sharpness(), Looks()], ids=lambda m: m.name)
def test_they_keep_the_contract(method: Method) -> None:
    for rule in (contract.engines_agree, contract.engines_agree_on_images, contract.padding_in_batches_is_masked):
        rule(Chain(method))


def test_a_chain_with_features_is_one_graph() -> None:
    contract.is_one_graph(Chain(Pushes(0.2), Decays()))
    contract.is_one_graph(Chain(Sharpness()))


@pytest.mark.parametrize("method", [Pushes(), Decays()], ids=lambda m: m.name)
def test_a_model_without_a_head_is_refused_by_name(method: Method) -> None:
    fed = federation(nn.Sequential(nn.Linear(5, 3), nn.LogSoftmax(-1)))
    with pytest.raises(ConfigError, match=f"method: {method.name} works on what the model's last linear layer reads"):
        start(fed, Chain(method), Serial(fed))

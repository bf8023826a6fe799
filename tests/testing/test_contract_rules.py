"""Every rule of the contract can be broken, and then says what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env
from equipoise.core.errors import ConfigError
from equipoise.core.method import Method
from equipoise.core.server_view import whole
from equipoise.core.tree import Tree
from equipoise.core.turn import Turn
from equipoise.methods import Astraea, FedProx
from equipoise.testing import ContractBroken, check_method, contract, examine


@dataclass(frozen=True)
class ForgetsTheDataMask(Method):
    """A trial author's mistake: the mean label of all places, padding included."""

    name = "forgets_the_data_mask"
    needs_data = True

    def begin(self, env: Env, data: Data | None) -> Tree:
        assert data is not None
        return {"mean": data.y.to(env.lr.dtype).mean()}

    def logits(self, logits: Tensor, env: Env) -> Tensor:
        return logits * (1 + env.note["mean"])


@dataclass(frozen=True)
class ForgetsTheBatchMask(Method):
    name = "forgets_the_batch_mask"

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        return losses * losses.mean()


CALLS: list[int] = []


@dataclass(frozen=True)
class RemembersInAModule(Method):
    name = "remembers_in_a_module"

    def update(self, update: Tree, sums: object, slot: Tree) -> tuple[Tree, Tree]:
        CALLS.append(1)
        return tree.scale(update, 1 / len(CALLS)), slot


@dataclass(frozen=True)
class Branches(Method):
    name = "branches"

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        return losses if float(losses.sum()) > 0 else -losses


@dataclass(frozen=True)
class CountsPlaces(Method):
    """Sends each client its place in the cohort."""

    name = "counts_places"
    words = {"place": "its place in the cohort"}  # noqa: RUF012

    def address(self, slot: Tree, ids: Tensor) -> Tree:
        return {"place": torch.arange(len(ids), dtype=torch.float64)}

    def delta(self, delta: Tree, env: Env) -> Tree:
        return tree.scale(delta, 1 + env.msg["place"])


@dataclass(frozen=True)
class Grows(Method):
    name = "grows"

    def init(self, turn: Turn) -> Tree:
        return {"seen": torch.zeros(1)}

    def close(self, slot: Tree, turn: Turn) -> Tree:
        return {"seen": torch.cat([slot["seen"], slot["seen"]])}


@dataclass(frozen=True)
class SaysNothing(Method):
    name = "says_nothing"

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return {"mystery": env.lr}, env.memory


@dataclass(frozen=True)
class Peeks(Method):
    """The server half reads, past its views, the clients' samples, which a simulation holds and a server does not."""

    name = "peeks"

    def init(self, turn: Turn) -> Tree:
        return {"first": whole(turn.engine).fed.y[:1].to(turn.engine.dtype)}


@dataclass(frozen=True)
class SetsAField(Method):
    scale: float = 1.0

    name = "sets_a_field"

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", self.scale + 1)


@pytest.mark.parametrize(
    ("method", "rule", "advice"),
    [
        (ForgetsTheDataMask(), contract.padding_in_data_is_masked, "where `data.mask` is false"),
        (ForgetsTheDataMask(), contract.engines_agree, "leave padding out"),
        (ForgetsTheBatchMask(), contract.padding_in_batches_is_masked, "where `env.mask` is false"),
        (RemembersInAModule(), contract.repeats_itself, "keep no state outside slot, memory and note"),
        (RemembersInAModule(), contract.resume_is_bitwise, "state escapes the checkpoint"),
        (Branches(), contract.is_one_graph, "no Python branch on a tensor's value"),
        (CountsPlaces(), contract.order_does_not_matter, "depends on its place in the cohort"),
        (Grows(), contract.trees_keep_their_shape, "the slot's grows/seen has another shape or type after round 1"),
        (SaysNothing(), contract.ledger_is_complete, "add 'mystery' to `words` of says_nothing"),
        (Peeks(), contract.sites_agree, "the server has no samples of the clients"),
        (SetsAField(), contract.is_its_configuration, "set no field in __post_init__"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_a_broken_rule_says_what_to_change(method: Method, rule: Callable[[Chain], None], advice: str) -> None:
    with pytest.raises(ContractBroken, match=advice):
        rule(Chain(method))


def test_a_method_that_forgets_the_mask_is_refused_as_a_whole() -> None:
    with pytest.raises(ContractBroken, match=r"padding in local data is masked: .* as in torch\.where"):
        check_method(ForgetsTheDataMask())


def test_a_class_within_a_function_cannot_be_named() -> None:
    @dataclass(frozen=True)
    class Inner(Method):
        name = "inner"

    with pytest.raises(ContractBroken, match="define the class at the top of a module"):
        contract.is_its_configuration(Chain(Inner()))


def test_neutral_settings_must_do_nothing() -> None:
    contract.neutral_is_fedavg(Chain(FedProx(mu=0.0)), 0)
    with pytest.raises(ContractBroken, match="with its neutral settings the method must do nothing"):
        contract.neutral_is_fedavg(Chain(FedProx(mu=0.1)), 1e-12)


def test_a_method_for_images_is_checked_on_images() -> None:
    fed, model = contract.suitable(Chain(Astraea(gamma=2, tau_d=2.0)))
    assert fed.x.dim() == 4
    assert model.endswith(":dropout_cnn")


@dataclass(frozen=True)
class Picky(Method):
    name = "picky_about_everything"

    def check(self, fed: object, chain: Chain) -> None:
        raise ConfigError("method: it likes no federation")


def test_what_a_method_refuses_is_told() -> None:
    found = {finding.rule: finding for finding in examine(Picky())}
    assert found["a method is its configuration"].kept
    assert found["resume is bitwise"] == ("resume is bitwise", False, "method: it likes no federation")

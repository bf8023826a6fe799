"""What every method must do, alone and in chains, on every engine: the rules of `equipoise.testing`, and more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.method import Method
from equipoise.methods import METHODS
from equipoise.models import build
from equipoise.runs.training import Settings
from equipoise.testing import contract
from equipoise.testing.contract import RULES, compare, everything, rounds
from tests.contract.methods import ALONE, CHAINED, EVERY, NEUTRAL
from tests.federations import dropout_cnn, federation, norm_cnn

COMPILED = [Chain(method) for method in (*ALONE, *CHAINED[::6])]  # compiling takes seconds: not every chain

every_method = pytest.mark.parametrize("chain", EVERY.values(), ids=EVERY.keys())
SPLIT = {contract.engines_agree_on_images, contract.is_one_graph}  # tested below, one by one


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule not in SPLIT], ids=lambda it: it.__name__)
@every_method
def test_the_contract(chain: Chain, rule: Callable[[Chain], None]) -> None:
    rule(chain)


@pytest.mark.parametrize("network", [norm_cnn, dropout_cnn])
@every_method
def test_engines_agree_with_buffers_and_dropout(chain: Chain, network: Callable[[], nn.Module]) -> None:
    contract.engines_agree_on_images(chain, network)


@pytest.mark.parametrize("chain", [Chain(), EVERY["scaffold"]], ids=["fedavg", "scaffold"])
def test_engines_agree_on_resnet18(chain: Chain) -> None:
    torch.manual_seed(5)
    fed = federation(build("resnet18", (3, 16, 16), 3, width=8), sizes=(5, 3, 4), shape=(3, 16, 16), cohort=0)
    contract.engines_agree(chain, fed, 1)


@pytest.mark.parametrize("chain", COMPILED, ids=str)
def test_compiled_equals_eager_and_resumes_bitwise(chain: Chain) -> None:
    fed = contract.equal_clients(chain)  # one shape, since each shape takes seconds to compile
    torch.compiler.reset()
    contract.resume_from_a_checkpoint(
        fed, chain, Settings(rounds=4), lambda fed: Stacked(fed, precision="float64", compile=True)
    )
    one, other = Stacked(fed, precision="float64", compile=True), Stacked(fed, precision="float64")
    want = everything(rounds(fed, chain, other, 2), other)
    compare(everything(rounds(fed, chain, one, 2), one), want, 1e-10, "compiled and eager differ")


def test_a_ragged_cohort_compiles() -> None:
    fed = federation(cohort=0)
    torch.compiler.reset()
    one, other = Stacked(fed, precision="float64", compile=True), Stacked(fed, precision="float64")
    want = everything(rounds(fed, Chain(), other, 2), other)
    compare(everything(rounds(fed, Chain(), one, 2), one), want, 1e-10, "compiled and eager differ")


@pytest.mark.parametrize("chain", [chain for chain in EVERY.values() if chain not in COMPILED], ids=str)
def test_each_part_of_a_visit_is_one_graph(chain: Chain) -> None:
    contract.is_one_graph(chain)


@pytest.mark.parametrize("method", ALONE, ids=str)
def test_a_repr_is_a_configuration(method: Method) -> None:
    assert eval(repr(method), {type(method).__name__: type(method)}) == method


@pytest.mark.parametrize(("method", "tolerance"), NEUTRAL, ids=lambda value: str(value))
def test_neutral_settings_are_fedavg(method: Method, tolerance: float) -> None:
    contract.neutral_is_fedavg(Chain(method), tolerance)


def test_every_exported_method_is_under_contract() -> None:
    assert {m.name for m in ALONE} == set(METHODS)

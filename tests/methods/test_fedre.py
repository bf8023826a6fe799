"""FedRE: weights from estimated shares, and refused settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Split
from equipoise.core.local import Local
from equipoise.core.round import one_round, start
from equipoise.methods import FedRE
from equipoise.papers.estimate import estimate
from equipoise.runs.ledger import ledger
from tests.federations import federation


def test_weights_follow_the_shares() -> None:
    fed = federation()
    method = FedRE(alpha=0.5, beta=0.02, floor=0.1, probe_lr=0.05, probe_epochs=2, probe_batch=4)
    slot = start(fed, Chain(method), Stacked(fed)).slots["fedre"]
    torch.testing.assert_close(slot["shares"].sum(), torch.tensor(1.0))
    torch.testing.assert_close(slot["weights"], 0.5 + 0.02 / slot["shares"] ** 2)
    assert method.metrics(slot) == {f"share_{c}": float(slot["shares"][c]) for c in range(3)}


def test_the_shares_are_those_of_the_function_estimate() -> None:
    fed = federation()
    slot = start(fed, Chain(FedRE()), Stacked(fed)).slots["fedre"]
    torch.testing.assert_close(slot["shares"], estimate(fed).shares, rtol=0, atol=0)
    other = start(fed, Chain(FedRE(probe_lr=0.2)), Stacked(fed)).slots["fedre"]
    assert not torch.allclose(slot["shares"], other["shares"])


def test_the_floor_bounds_the_weights() -> None:
    fed = federation()
    flat = replace(fed, y=torch.zeros_like(fed.y))  # two classes have no samples
    method = FedRE(beta=0.01, floor=0.3, probe_lr=0.05, probe_epochs=50)
    weights = start(flat, Chain(method), Stacked(flat)).slots["fedre"]["weights"]
    assert float(weights.max()) <= 1 + 0.01 / (0.1 / 1.2) ** 2
    assert weights[1] > 1.5
    assert weights[0] < 1.1


def test_the_weights_apply_from_the_first_round_on() -> None:
    fed = federation(local=Local(lr=0.05, batch=4))
    engine = Stacked(fed)
    chain = Chain(FedRE(beta=0.05))
    state = start(fed, chain, engine)
    after, _ = one_round(state, fed, chain, engine)
    plain, _ = one_round(start(fed, Chain(), engine), fed, Chain(), engine)
    assert torch.equal(after.slots["fedre"]["weights"], state.slots["fedre"]["weights"])
    assert not torch.equal(after.params["0.weight"], plain.params["0.weight"])


def test_it_needs_samples_of_every_class_at_the_server() -> None:
    missing = federation(auxiliary=0)
    with pytest.raises(ConfigError, match=r"fedre needs samples of every class .* has those of 0 of 3 .* = 32"):
        start(missing, Chain(FedRE()), Stacked(missing))
    fed = federation()
    assert fed.auxiliary is not None
    kept = fed.auxiliary.y != 1
    short = replace(fed, auxiliary=Split(fed.auxiliary.x[kept], fed.auxiliary.y[kept]))
    with pytest.raises(ConfigError, match="has those of 2 of 3 classes"):
        start(short, Chain(FedRE()), Stacked(short))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("alpha", -1.0, "0 or above"),
        ("beta", float("inf"), "0 or above"),
        ("floor", 0.0, "above 0"),
        ("floor", 1.0, r"in \[0, 1\)"),
        ("probe_lr", 0.0, "above 0"),
        ("probe_epochs", 0, "1 or above"),
        ("probe_batch", 2.5, "whole number"),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: float, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"fedre\({field}={value}\).*{expected}"):
        FedRE(**{field: value})  # type: ignore[arg-type]


def test_the_ledger_says_what_the_server_learns_of_a_client() -> None:
    entries = ledger(FedRE())
    assert any(e.direction == "reveals" and "class_shares" in e.what for e in entries)
    once = [e for e in entries if e.direction == "sends" and "once" in e.what]
    assert [e.size for e in once] == ["model"]
    assert "square loss" in once[0].meaning

"""With every method, sites that exchange serialised messages give the same results as the stacked engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipoise.core.chain import Chain
from equipoise.core.federation import Federation
from equipoise.testing.contract import compare as close
from equipoise.testing.contract import plain as stacked
from equipoise.testing.contract import rounds
from equipoise.testing.in_process import site_memories, without_samples
from tests.contract.methods import EVERY
from tests.deploy.sites import engine, sites
from tests.federations import federation, image_federation, norm_cnn

LINEAR, NORM = "tests.federations:linear5", "tests.federations:norm_cnn"


def compare(
    fed: Federation,
    chain: Chain,
    model: str,
    folder: Path,
    count: int,
    tolerance: float,
    methods: tuple[str, ...] = (),
) -> None:
    """Train with sites and with the stacked engine, and compare all that the two runs keep."""
    local = stacked(fed, width=3)
    want = rounds(fed, chain, local, count)
    remote = engine(without_samples(fed), chain, sites(fed, folder, model, methods), model)
    got = rounds(without_samples(fed), chain, remote, count)
    close(got.params, want.params, tolerance)
    close(got.buffers, want.buffers, tolerance)
    close(got.slots, want.slots, tolerance)
    close(site_memories(remote, folder), local.memory.save(), tolerance)


@pytest.mark.parametrize("chain", EVERY.values(), ids=EVERY.keys())
def test_sites_equal_the_stacked_engine(chain: Chain, tmp_path: Path) -> None:
    compare(federation(), chain, LINEAR, tmp_path, 3, 1e-10)


@pytest.mark.parametrize(
    "chain", [EVERY["fedavg"], EVERY["scaffold"], EVERY["climb(eta=2.0, epsilon=0.01, every=1)"]], ids=str
)
def test_sites_equal_the_stacked_engine_with_buffers(chain: Chain, tmp_path: Path) -> None:
    torch.manual_seed(4)
    compare(image_federation(norm_cnn()), chain, NORM, tmp_path, 2, 1e-9)

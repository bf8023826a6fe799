"""The client half, driven over serialised messages, does for every method what the stacked engine does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equipoise import tree
from equipoise.engines.flower import Flower
from equipoise.federation import Federation
from equipoise.method import Chain
from equipoise.tree import Tree
from tests.contract.methods import EVERY
from tests.contract.test_contract import close, rounds, stacked
from tests.deploy.sites import engine, sites
from tests.federations import federation, image_federation, norm_cnn

LINEAR, NORM = "tests.federations:linear5", "tests.federations:norm_cnn"


def blind(fed: Federation) -> Federation:
    """The federation as a server has it, which holds no sample of the clients."""
    return replace(fed, x=fed.x[:0], y=fed.y[:0], indices=fed.indices[:0], offsets=torch.arange(fed.clients + 1))


def memories(engine: Flower, folder: Path) -> Tree:
    """What the sites keep, laid out as a simulation does."""
    from equipoise.deploy.versions import NEVER, Versions

    kept: dict[str, list[tuple[int, Tree]]] = {}
    for client, name in enumerate(engine.agreement.roster):
        version = engine.committed.version(client)
        if version != NEVER:
            for method, own in Versions(folder / name / "test").read(version).items():
                kept.setdefault(method, []).append((client, own["rows"]))
    return {
        method: {
            "clients": torch.tensor([client for client, _ in rows]),
            "rows": tree.map(lambda *parts: torch.cat(parts), *(own for _, own in rows)),
        }
        for method, rows in kept.items()
    }


def compare(fed: Federation, chain: Chain, model: str, folder: Path, count: int, tolerance: float) -> None:
    local = stacked(fed, width=3)
    want = rounds(fed, chain, local, count)
    remote = engine(blind(fed), chain, sites(fed, folder, model), model)
    got = rounds(blind(fed), chain, remote, count)
    close(got.params, want.params, tolerance)
    close(got.buffers, want.buffers, tolerance)
    close(got.slots, want.slots, tolerance)
    close(memories(remote, folder), local.memory.save(), tolerance)


@pytest.mark.parametrize("chain", EVERY.values(), ids=EVERY.keys())
def test_sites_equal_the_stacked_engine(chain: Chain, tmp_path: Path) -> None:
    compare(federation(), chain, LINEAR, tmp_path, 3, 1e-10)


@pytest.mark.parametrize(
    "chain", [EVERY["fedavg"], EVERY["scaffold"], EVERY["climb(eta=2.0, epsilon=0.01, every=1)"]], ids=str
)
def test_buffers_travel_too(chain: Chain, tmp_path: Path) -> None:
    torch.manual_seed(4)
    compare(image_federation(norm_cnn()), chain, NORM, tmp_path, 2, 1e-9)

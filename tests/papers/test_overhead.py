"""The cost of Astraea compared with FedAvg: the formulas of the paper, and a federation."""

from __future__ import annotations

import pytest
import torch

from equipoise.core import tree
from equipoise.methods import Astraea
from equipoise.papers.overhead import overhead, seconds, traffic
from tests.federations import federation, image_federation, norm_cnn


def test_traffic_is_the_papers_formula() -> None:
    assert traffic(100, clients=50, gamma=10) == 2 * 100 * (5 + 50)
    assert traffic(100, clients=51, gamma=10) == 2 * 100 * (6 + 51)
    assert traffic(100, clients=50, gamma=10, mediator_epochs=3) == 2 * 100 * (5 + 150)


def test_a_chain_takes_the_time_of_its_clients_one_after_another() -> None:
    # Equal clients of one epoch, no transfers: E_m gamma E T, as the paper has it.
    plan = torch.arange(6).view(3, 2).repeat(2, 1)
    sizes = torch.full((6,), 10)
    assert seconds(plan, sizes, 4, 0, per_sample=0.5, bandwidth=1.0) == 2 * 3 * 4 * (10 * 0.5)


def test_the_slowest_lane_is_waited_for() -> None:
    sizes = torch.tensor([10, 20, 5])
    plan = torch.tensor([[0, 1], [2, -1]])
    # lane 0: two visits and 15 samples; lane 1: one visit and 20 samples; and the mediators' own exchange
    assert seconds(plan, sizes, 1, 50, per_sample=1.0, bandwidth=100.0) == max(15 + 2, 20 + 1) + 1


def test_overhead_of_a_federation() -> None:
    torch.manual_seed(0)
    fed = image_federation(norm_cnn())
    method = Astraea(gamma=2, tau_d=1.5, mediator_epochs=2)
    cost = overhead(fed, method, per_sample=0.01, bandwidth=1e6, per_copy=0.5)
    model = tree.nbytes(fed.network.params) + tree.nbytes(fed.network.buffers)
    copies = round(cost.storage * len(fed.indices))
    assert copies > 0
    assert cost.storage_bytes == copies * 36 * 4
    assert cost.storage_bytes_per_client == pytest.approx(cost.storage_bytes / fed.clients)
    assert cost.traffic_bytes == 2 * model * (2 + 4 * 2)
    assert cost.fedavg_traffic_bytes == 2 * model * 4
    assert cost.round_seconds > 2 * cost.fedavg_round_seconds
    assert 0 < cost.augmenting_seconds <= copies * 0.5


def test_resampling_without_chains_moves_what_fedavg_moves() -> None:
    fed = federation()
    cost = overhead(fed, Astraea(gamma=1, mediator_epochs=1, tau_d=None), per_sample=0.01, bandwidth=1e6)
    assert cost.storage == 0
    assert cost.traffic_bytes == cost.fedavg_traffic_bytes
    assert cost.round_seconds == cost.fedavg_round_seconds

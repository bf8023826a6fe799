from __future__ import annotations

import math

import pytest
import torch

from equipoise.methods.shared import mediators
from tests.federations import federation
from tests.reference import astraea


def test_divergence_from_uniform() -> None:
    counts = torch.tensor([[4, 4, 4, 4], [9, 0, 0, 0], [3, 1, 0, 0], [0, 0, 0, 0]])
    want = [0.0, math.log(4), 0.75 * math.log(3) + 0.25 * math.log(1), 0.0]
    assert mediators.kld(counts).tolist() == pytest.approx(want)


def test_divergence_agrees_with_plain_arithmetic() -> None:
    labels = [0] * 5 + [1] * 2 + [3] * 9
    counts = torch.bincount(torch.tensor(labels), minlength=5)
    assert float(mediators.kld(counts)) == pytest.approx(astraea.divergence(labels, 5))


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 20])
def test_the_greedy_order_is_that_of_the_reference(gamma: int) -> None:
    fed = federation(sizes=(7, 12, 1, 20, 5, 9, 3, 8, 8, 14, 2), classes=5)
    cohort = [0, 2, 3, 4, 6, 7, 8, 9, 10]
    rows = [fed.y[astraea.client_rows(fed, c)] for c in cohort]
    place = mediators.assign(torch.stack([torch.bincount(y, minlength=5) for y in rows]), gamma)
    plan = mediators.lanes(torch.tensor(cohort), place, gamma, epochs=1)
    got = [[c for c in lane if c >= 0] for lane in plan.T.tolist()]
    assert sorted(got) == sorted(astraea.mediators(fed, cohort, gamma))


def test_a_mediator_balances_opposite_clients() -> None:
    place = mediators.assign(torch.tensor([[9, 0], [8, 0], [0, 9], [0, 8]]), gamma=2)
    assert place.tolist() == [0, 2, 1, 3]


def test_equal_clients_are_taken_in_order() -> None:
    # Permuted classes: the divergences are equal, but their sums may differ in the last bit.
    counts = torch.tensor([[7, 2, 1], [1, 7, 2], [2, 1, 7]])
    assert mediators.assign(counts, gamma=1).tolist() == [0, 1, 2]


def test_lanes_of_one_are_the_cohort() -> None:
    ids = torch.tensor([2, 5, 7, 11])
    plan = mediators.lanes(ids, torch.tensor([3, 0, 2, 1]), gamma=1, epochs=1)
    assert torch.equal(plan, ids[None, :])


def test_mediator_epochs_repeat_the_lanes() -> None:
    plan = mediators.lanes(torch.tensor([4, 6, 9]), torch.tensor([1, 0, 2]), gamma=2, epochs=3)
    assert plan.tolist() == [[6, 9], [4, -1]] * 3


def test_absent_members_leave_their_mediator_shorter() -> None:
    # Places 0 to 3 are two mediators of two clients; the clients at places 1 and 2 are absent.
    plan = mediators.lanes(torch.tensor([3, 8]), torch.tensor([0, 3]), gamma=2, epochs=1)
    assert plan.tolist() == [[3, 8]]


def test_a_plan_without_clients() -> None:
    nobody = torch.zeros(0, dtype=torch.int64)
    assert mediators.lanes(nobody, mediators.assign(torch.zeros(0, 3), 2), 2, 1).shape == (1, 0)

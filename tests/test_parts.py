"""Visits cut into parts: nobody misses a step, and few shapes are few."""

from __future__ import annotations

import pytest
import torch

from equipoise.engines.parts import CROWD, LONG, SHORT, few, parts, room

WAYS = [(False, False), (True, False), (True, True)]


def cohorts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    drawn = [(torch.rand(n, generator=draw) ** 3 * most).long() + 1 for n, most in ((1, 9), (7, 40), (100, 190))]
    return [[5], [200] * 3, *(sorted(steps.tolist(), reverse=True) for steps in drawn)]


@pytest.mark.parametrize(("few_shapes", "recorded"), WAYS)
@pytest.mark.parametrize("steps", cohorts(), ids=len)
def test_every_client_takes_each_of_its_steps_once(steps: list[int], few_shapes: bool, recorded: bool) -> None:
    cut = list(parts(steps, few_shapes, recorded))
    assert [part.first for part in cut[1:]] == [part.first + part.steps for part in cut[:-1]]
    assert cut[0].first == 0
    end = cut[-1].first + cut[-1].steps
    assert steps[0] <= end <= room(steps[0])
    for part in cut:
        needed = sum(mine > part.first for mine in steps)
        assert needed <= part.clients <= len(steps)
        last_needs_all = steps[part.clients - 1] >= part.first + part.steps
        assert part.ragged or last_needs_all  # whoever may have finished must be able to stand still


def test_few_shapes_are_few_and_waste_less_than_half() -> None:
    steps = cohorts()[-1]
    cut = list(parts(steps, True, True))
    assert len({part.clients for part in cut}) <= 5
    assert {part.steps for part in cut} == {SHORT}
    for part in cut:
        needed = sum(mine > part.first for mine in steps)
        assert part.clients < 2 * needed or part.clients <= CROWD


def test_clients_with_as_many_steps_come_in_long_parts() -> None:
    assert [part.steps for part in parts([200, 200], True, True)] == [LONG, LONG, LONG, 8]
    assert not any(part.ragged for part in parts([200, 200], True, True))


def test_few_numbers_are_few_and_never_too_small() -> None:
    given = range(1, 1000)
    found = [few(n, 1000, 1) for n in given]
    assert all(n <= f < 1.5 * n for n, f in zip(given, found, strict=True))
    assert len(set(found)) <= 21
    assert {few(n, 1000, 8) for n in range(125, 1001)} == {1000}

"""Visits cut into parts: nobody misses a step, and few shapes are few."""

from __future__ import annotations

import pytest
import torch

from equipoise.engines.parts import BRIEF, FULL, LONG, SHORT, Part, few, room, tracks

WAYS = [(False, 0), (True, 0), (True, 1), (True, 8), (True, 1000)]


def cohorts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    drawn = [(torch.rand(n, generator=draw) ** 3 * most).long() + 1 for n, most in ((1, 9), (7, 40), (100, 190))]
    return [[5], [200] * 3, *(sorted(steps.tolist(), reverse=True) for steps in drawn)]


def trained(steps: list[int], few_shapes: bool, crowd: int) -> list[tuple[list[int], list[Part]]]:
    """The steps of the clients of each track, and its parts."""
    return [(steps[track.clients], list(track.parts(steps, few_shapes))) for track in tracks(steps, crowd)]


@pytest.mark.parametrize(("few_shapes", "crowd"), WAYS)
@pytest.mark.parametrize("steps", cohorts(), ids=len)
def test_every_client_takes_each_of_its_steps_once(steps: list[int], few_shapes: bool, crowd: int) -> None:
    found = trained(steps, few_shapes, crowd)
    assert [mine for some, _ in found for mine in some] == steps
    for some, cut in found:
        assert [part.first for part in cut[1:]] == [part.first + part.steps for part in cut[:-1]]
        assert cut[0].first == 0
        assert some[0] <= cut[-1].first + cut[-1].steps <= room(some[0])
        for part in cut:
            assert sum(mine > part.first for mine in some) <= part.clients <= len(some)
            last_needs_all = some[part.clients - 1] >= part.first + part.steps
            assert part.ragged or last_needs_all  # whoever may have finished must be able to stand still


def test_few_shapes_are_few() -> None:
    steps = cohorts()[-1]
    ((_, cut),) = trained(steps, True, 8)
    assert {part.steps for part in cut} == {SHORT}
    assert {part.clients for part in cut} == {100, 50, 25}
    for part in cut:
        needed = sum(mine > part.first for mine in steps)
        assert part.clients < 2 * needed or part.clients == 25


def test_a_full_device_trains_in_quarters_and_wastes_little() -> None:
    steps = cohorts()[-1]
    assert len(steps) >= 2 * FULL
    cut = [part for _, parts in trained(steps, True, 2) for part in parts]
    assert {part.steps for part in cut} == {BRIEF}
    assert {part.clients for part in cut} == {25, 13, 7}
    assert sum(part.clients * part.steps for part in cut) < 1.3 * sum(steps)
    (alone,) = tracks([20] * 50 + [19] * 50, crowd=2)
    assert alone.clients == slice(0, 100)


def test_clients_with_as_many_steps_come_in_long_parts() -> None:
    ((_, cut),) = trained([200, 200], True, 8)
    assert [part.steps for part in cut] == [LONG, LONG, LONG, 8]
    assert not any(part.ragged for part in cut)


def test_few_numbers_are_few_and_never_too_small() -> None:
    given = range(1, 1000)
    found = [few(n, 1000, 1) for n in given]
    assert all(n <= f < 1.5 * n for n, f in zip(given, found, strict=True))
    assert len(set(found)) <= 21
    assert {few(n, 1000, 8) for n in range(125, 1001)} == {1000}

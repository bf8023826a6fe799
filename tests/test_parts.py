"""Visits cut into parts: nobody misses a step, and few shapes are few."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from equipoise.engines.parts import BRIEF, FULL, GRAIN, HANDFUL, LONG, Part, few, groups, room

# Of the benchmarks' ragged cohort: 100 clients by a Dirichlet draw of 0.1, in batches of 32.
RAGGED = [
    59, 54, 53, 52, 51, 50, 50, 45, 44, 39, 37, 37, 35, 34, 33, 32, 31, 31, 30, 30, 30, 29, 29, 28, 27, 27, 27, 27,
    26, 25, 25, 25, 24, 24, 23, 23, 23, 22, 21, 21, 21, 20, 20, 20, 20, 20, 19, 19, 19, 19, 19, 17, 16, 16, 15, 15,
    14, 14, 13, 13, 12, 12, 12, 11, 11, 11, 11, 10, 10, 10, 10, 10, 10, 9, 9, 9, 7, 7, 6, 5, 5, 4, 4, 4, 3, 3, 3, 3,
    3, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1,
]  # fmt: skip
WAYS = [
    (few, crowd, again)
    for again in (False, True)
    for few, crowd in ((False, 0), *((True, n) for n in (0, 1, 8, 1000)))
]


def cohorts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    drawn = [(torch.rand(n, generator=draw) ** 3 * most).long() + 1 for n, most in ((1, 9), (7, 40), (100, 190))]
    return [[5], [200] * 3, RAGGED, *(sorted(steps.tolist(), reverse=True) for steps in drawn)]


def trained(
    steps: list[int], few_shapes: bool, crowd: int, again: bool = False
) -> list[tuple[list[int], list[Part]]]:
    """The steps of the clients of each track, and its parts."""
    found = []
    for group in groups(steps, crowd):
        stages = list(group.stages(steps, few_shapes, again))
        for track in group.tracks:
            found.append((steps[track], [part for stage in stages for part in stage if part.track == track.start]))
    return found


@pytest.mark.parametrize(("few_shapes", "crowd", "again"), WAYS)
@pytest.mark.parametrize("steps", cohorts(), ids=len)
def test_every_client_takes_each_of_its_steps_once(
    steps: list[int], few_shapes: bool, crowd: int, again: bool
) -> None:
    found = trained(steps, few_shapes, crowd, again)
    assert [mine for some, _ in found for mine in some] == steps
    for some, cut in found:
        assert [part.first for part in cut[1:]] == [part.first + part.steps for part in cut[:-1]]
        assert cut[0].first == 0
        assert some[0] <= cut[-1].first + cut[-1].steps <= room(some[0])
        assert not again or cut[-1].first + cut[-1].steps == some[0]  # then no step is one too many
        for part in cut:
            assert sum(mine > part.first for mine in some) <= part.clients <= len(some)
            last_needs_all = some[part.clients - 1] >= part.first + part.steps
            assert part.ragged or last_needs_all  # whoever may have finished must be able to stand still


def test_few_shapes_are_few() -> None:
    steps = cohorts()[-1]
    long, short = trained(steps, True, 8)
    assert {part.clients for part in long[1]} == {12, 9, 6}
    assert {part.clients for part in short[1]} == {88, 66, 44, 33, 22, 17, 11, 9, 6}
    for some, cut in (long, short):
        assert not any(part.steps % GRAIN for part in cut)
        for part in cut:
            needed = sum(mine > part.first for mine in some)
            assert part.clients < 1.5 * needed + 1 or part.clients <= HANDFUL
    (group,) = groups(steps, 8)
    shapes = {tuple((part.track, part.clients, part.steps) for part in stage) for stage in group.stages(steps, True)}
    assert len(shapes) <= 12


def test_the_longest_go_beside_the_others() -> None:
    """By what a step of a small model took on an H200, in microseconds; a part waits for what goes beside it."""
    (group,) = groups(RAGGED, crowd=21)
    stages = list(group.stages(RAGGED, few_shapes=True))

    def time(parts: Iterable[Part]) -> float:
        return sum(part.steps * (58 + 0.72 * part.clients) for part in parts)

    alone = [time(cut) for _, cut in trained(RAGGED, True, 21)]
    at_once = sum(max(time([part]) for part in stage) for stage in stages)
    assert len(alone) == 2
    assert max(alone) <= at_once < min(1.1 * max(alone), 4500)
    assert sum(part.clients * part.steps for stage in stages for part in stage) < 1.3 * sum(RAGGED)
    exact = [part for stage in group.stages(RAGGED, few_shapes=True, again=True) for part in stage]
    assert sum(part.clients * part.steps for part in exact) < 1.15 * sum(RAGGED)


@pytest.mark.parametrize("steps", [[20] * 50 + [19] * 50, [20] * 4 + [2] * 11], ids=["alike", "few"])
def test_clients_that_are_alike_or_few_are_one_track(steps: list[int]) -> None:
    (group,) = groups(steps, crowd=21)
    assert group.tracks == [slice(0, len(steps))]


def test_a_full_device_trains_in_quarters_and_wastes_little() -> None:
    steps = cohorts()[-1]
    assert len(steps) >= 2 * FULL
    cut = [part for _, parts in trained(steps, True, 2) for part in parts]
    assert {part.steps for part in cut} == {BRIEF}
    assert {part.clients for part in cut} == {25, 13, 7}
    assert sum(part.clients * part.steps for part in cut) < 1.3 * sum(steps)
    (alike,) = groups([20] * 50 + [19] * 50, crowd=2)
    assert alike.tracks == [slice(0, 100)]


def test_a_handful_comes_in_parts_that_are_long_but_of_few_lengths() -> None:
    for steps in ([65, 60, 52, 48, 30], [99, 3], [7, 2]):
        ((_, cut),) = trained(steps, True, HANDFUL)
        assert sum(part.steps for part in cut) < steps[0] + GRAIN
        assert {part.steps for part in cut} <= {4, 8, 16, 32, 64}
        assert len(cut) <= 4


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

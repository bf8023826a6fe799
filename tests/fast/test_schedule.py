"""How visits are cut into parts: every client takes all its steps, and the parts have few different shapes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from equipoise.fast.schedule import (
    FULL_FACTOR,
    MOST_STEPS,
    RAGGED_STEPS_FULL,
    SMALLEST_TRACK,
    STEP_MULTIPLE,
    Part,
    bucket,
    groups,
    padded_steps,
)

# Steps in the benchmarks' ragged cohort: 100 clients by a Dirichlet draw of 0.1, in batches of 32.
RAGGED = [
    59, 54, 53, 52, 51, 50, 50, 45, 44, 39, 37, 37, 35, 34, 33, 32, 31, 31, 30, 30, 30, 29, 29, 28, 27, 27, 27, 27,
    26, 25, 25, 25, 24, 24, 23, 23, 23, 22, 21, 21, 21, 20, 20, 20, 20, 20, 19, 19, 19, 19, 19, 17, 16, 16, 15, 15,
    14, 14, 13, 13, 12, 12, 12, 11, 11, 11, 11, 10, 10, 10, 10, 10, 10, 9, 9, 9, 7, 7, 6, 5, 5, 4, 4, 4, 3, 3, 3, 3,
    3, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1,
]  # fmt: skip
WAYS = [
    (few_shapes, latency_clients, repeats)
    for repeats in (False, True)
    for few_shapes, latency_clients in ((False, 0), *((True, n) for n in (0, 1, 8, 1000)))
]


def cohorts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    drawn = [(torch.rand(n, generator=draw) ** 3 * most).long() + 1 for n, most in ((1, 9), (7, 40), (100, 190))]
    return [[5], [200] * 3, RAGGED, *(sorted(steps.tolist(), reverse=True) for steps in drawn)]


def trained(
    steps: list[int], few_shapes: bool, latency_clients: int, repeats: bool = False
) -> list[tuple[list[int], list[Part]]]:
    """The steps of the clients of each track, and its parts."""
    found = []
    for group in groups(steps, latency_clients):
        stages = list(group.stages(steps, few_shapes, repeats))
        for track in group.tracks:
            found.append((steps[track], [part for stage in stages for part in stage if part.track == track.start]))
    return found


@pytest.mark.parametrize(("few_shapes", "latency_clients", "repeats"), WAYS)
@pytest.mark.parametrize("steps", cohorts(), ids=len)
def test_every_client_takes_each_of_its_steps_once(
    steps: list[int], few_shapes: bool, latency_clients: int, repeats: bool
) -> None:
    found = trained(steps, few_shapes, latency_clients, repeats)
    assert [mine for some, _ in found for mine in some] == steps
    for some, cut in found:
        assert [part.first for part in cut[1:]] == [part.first + part.steps for part in cut[:-1]]
        assert cut[0].first == 0
        assert some[0] <= cut[-1].first + cut[-1].steps <= padded_steps(some[0])
        assert not repeats or cut[-1].first + cut[-1].steps == some[0]  # then no part goes beyond the last step
        for part in cut:
            assert sum(mine > part.first for mine in some) <= part.clients <= len(some)
            last_needs_all = some[part.clients - 1] >= part.first + part.steps
            assert part.ragged or last_needs_all  # clients may have finished in ragged parts alone


def test_a_ragged_cohort_has_few_shapes() -> None:
    steps = cohorts()[-1]
    long, short = trained(steps, True, 8)
    assert {part.clients for part in long[1]} == {12, 9, 6}
    assert {part.clients for part in short[1]} == {88, 66, 44, 33, 22, 17, 11, 9, 6}
    for some, cut in (long, short):
        assert not any(part.steps % STEP_MULTIPLE for part in cut)
        for part in cut:
            needed = sum(mine > part.first for mine in some)
            assert part.clients < 1.5 * needed + 1 or part.clients <= SMALLEST_TRACK
    (group,) = groups(steps, 8)
    shapes = {tuple((part.track, part.clients, part.steps) for part in stage) for stage in group.stages(steps, True)}
    assert len(shapes) <= 12


def test_two_tracks_side_by_side_hardly_wait_for_each_other() -> None:
    """Times are those of a step of a small model on an H200, in microseconds; a stage takes as long as its slower
    part."""
    (group,) = groups(RAGGED, latency_clients=21)
    stages = list(group.stages(RAGGED, few_shapes=True))

    def time(parts: Iterable[Part]) -> float:
        return sum(part.steps * (58 + 0.72 * part.clients) for part in parts)

    alone = [time(cut) for _, cut in trained(RAGGED, True, 21)]
    at_once = sum(max(time([part]) for part in stage) for stage in stages)
    assert len(alone) == 2
    assert max(alone) <= at_once < min(1.1 * max(alone), 4500)
    assert sum(part.clients * part.steps for stage in stages for part in stage) < 1.3 * sum(RAGGED)
    exact = [part for stage in group.stages(RAGGED, few_shapes=True, repeats=True) for part in stage]
    assert sum(part.clients * part.steps for part in exact) < 1.15 * sum(RAGGED)


@pytest.mark.parametrize("steps", [[20] * 50 + [19] * 50, [20] * 4 + [2] * 11], ids=["similar", "few"])
def test_cohorts_of_similar_or_of_few_clients_are_one_track(steps: list[int]) -> None:
    (group,) = groups(steps, latency_clients=21)
    assert group.tracks == [slice(0, len(steps))]


def test_a_full_device_trains_in_quarters_and_wastes_little() -> None:
    steps = cohorts()[-1]
    assert len(steps) >= 2 * FULL_FACTOR
    cut = [part for _, parts in trained(steps, True, 2) for part in parts]
    assert {part.steps for part in cut} == {RAGGED_STEPS_FULL}
    assert {part.clients for part in cut} == {25, 13, 7}
    assert sum(part.clients * part.steps for part in cut) < 1.3 * sum(steps)
    (alike,) = groups([20] * 50 + [19] * 50, latency_clients=2)
    assert alike.tracks == [slice(0, 100)]


def test_a_track_that_does_not_shrink_has_few_parts_of_few_lengths() -> None:
    for steps in ([65, 60, 52, 48, 30], [99, 3], [7, 2]):
        ((_, cut),) = trained(steps, True, SMALLEST_TRACK)
        assert sum(part.steps for part in cut) < steps[0] + STEP_MULTIPLE
        assert {part.steps for part in cut} <= {4, 8, 16, 32, 64}
        assert len(cut) <= 4


def test_clients_with_equal_steps_train_in_the_longest_parts() -> None:
    ((_, cut),) = trained([200, 200], True, 8)
    assert [part.steps for part in cut] == [MOST_STEPS, MOST_STEPS, MOST_STEPS, 8]
    assert not any(part.ragged for part in cut)


def test_buckets_are_few_and_never_too_small() -> None:
    given = range(1, 1000)
    found = [bucket(n, 1000, 1) for n in given]
    assert all(n <= f < 1.5 * n for n, f in zip(given, found, strict=True))
    assert len(set(found)) <= 21
    assert {bucket(n, 1000, 8) for n in range(125, 1001)} == {1000}

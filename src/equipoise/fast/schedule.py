"""How the training of many clients is cut into parts: which clients train in each part, and for how many steps.

Clients come in falling order of steps. A *track* is a range of clients that train as one stack, which shrinks as its
clients finish. A *group* is one track, or two that run side by side; groups run one after another. A *stage* is the
next part of every track of a group. Every number of clients and of steps is another shape to compile or to record, so
that both are taken from short lists of values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import neg
from typing import NamedTuple

MOST_STEPS = 64  # steps of the longest part
RAGGED_STEPS = 8  # steps of a part whose clients have different numbers of steps
RAGGED_STEPS_FULL = 2  # the same, where the clients fill the GPU
STEP_MULTIPLE = 4  # steps of ragged parts are multiples of this (of RAGGED_STEPS_FULL if that is smaller)
FULL_FACTOR = 16  # a GPU counts as full from this many times `latency_clients` on
SMALLEST_TRACK = 8  # clients: below this and `latency_clients`, shrinking a track hardly shortens its steps
SPLIT_FROM = 16  # clients: a smaller cohort is never split into two tracks


class Part(NamedTuple):
    """Some steps of one track."""

    track: int  # the number of the track's first client, which identifies the track
    clients: int  # how many clients of the track train: the first ones, which have the most steps
    first: int  # the number of the first step
    steps: int
    ragged: bool  # may some of these clients have finished already? A step then leaves them unchanged


Stage = list[Part]  # one part of each track, run side by side


class Group(NamedTuple):
    """Clients that train at the same time: one or two tracks, side by side."""

    tracks: list[slice]  # in falling order of steps
    latency_clients: int
    smallest: int  # clients: a track of at most this many does not shrink any more
    ragged_steps: int  # steps of a part whose clients have different numbers of steps

    @property
    def gpu_has_room(self) -> bool:
        """Is there a GPU, and do these clients leave a part of it idle? Then steps are fast and their shapes are
        compiled quickly, so that a track may have more sizes."""
        return self.ragged_steps == RAGGED_STEPS

    def stages(self, steps: Sequence[int], few_shapes: bool, repeats: bool = False) -> Iterator[Stage]:
        """The stages, one after another, until every client has taken all of its steps.

        With `few_shapes`, a track only ever has one of the `track_sizes`, and clients that have finished stay in it
        until the next size is large enough for the others. The parts of a stage take about the same time: a track
        with fewer clients gets more steps. If the same cohort trains in every round (`repeats`), the same few parts
        come again and again, so that each may last until its track can shrink.

        >>> (everybody,) = groups([3, 3, 1], latency_clients=0)
        >>> [(part.clients, part.steps) for (part,) in everybody.stages([3, 3, 1], few_shapes=False)]
        [(3, 1), (2, 2)]
        >>> [(part.clients, part.steps) for (part,) in everybody.stages([3, 3, 1], few_shapes=True)]
        [(3, 1), (2, 1), (2, 1)]
        >>> steps = [24] * 4 + [16] * 9 + [7] * 3
        >>> (both,) = groups(steps, latency_clients=2)
        >>> for stage in both.stages(steps, few_shapes=True):
        ...     print([(part.clients, part.first, part.steps) for part in stage])
        [(4, 0, 12), (12, 0, 8)]
        [(4, 12, 12), (9, 8, 8)]
        >>> for stage in both.stages(steps, few_shapes=True, repeats=True):
        ...     print([(part.clients, part.first, part.steps) for part in stage])
        [(4, 0, 24), (12, 0, 7)]
        [(9, 7, 9)]
        """
        active = [_Progress(track.start, steps[track]) for track in self.tracks]
        allowed = {track.track: track_sizes(track.clients, self.smallest, fine=self.gpu_has_room) for track in active}
        even = active[0].steps[0] == active[-1].steps[-1]
        while active := [track for track in active if track.steps_left > 0]:
            for track in active:
                track.shrink(allowed[track.track] if few_shapes else None)
            if not few_shapes:
                yield [track.part(track.steps_until_one_finishes, False) for track in active]
            elif even or repeats:
                yield [
                    track.part(min(MOST_STEPS, track.steps_until_it_shrinks(allowed[track.track])), not even)
                    for track in active
                ]
            elif len(active) == 1 and active[0].clients <= self.smallest and self.gpu_has_room:
                yield [active[0].part(_steps_without_shrinking(active[0].steps_left), True)]
            else:
                slowest = max(self._step_time(track.clients) for track in active)
                yield [track.part(self._balanced_steps(track, slowest), True) for track in active]

    def _balanced_steps(self, track: _Progress, slowest: int) -> int:
        """How many steps the track takes in about the time in which the slowest track takes `ragged_steps`; no more
        than the track needs."""
        multiple = min(STEP_MULTIPLE, self.ragged_steps)
        balanced = multiple * round(self.ragged_steps * slowest / (multiple * self._step_time(track.clients)))
        return min(balanced, round_up(track.steps_left, multiple))

    def _step_time(self, clients: int) -> int:
        """The time of one step in an arbitrary unit. On an H200, where `latency_clients` was 21, a round of 100 equal
        clients (2.67 ms) and a ragged one in a single track (6.51 ms) fit 58 + 0.72 * clients microseconds."""
        return 4 * self.latency_clients + clients


def _steps_without_shrinking(left: int) -> int:
    """The steps of a part of a track that does not shrink any more: the largest power of two that fits, so that there
    are few parts to launch, of few lengths."""
    return min(MOST_STEPS, max(STEP_MULTIPLE, 1 << left.bit_length() - 1))


def track_sizes(clients: int, smallest: int, fine: bool) -> list[int]:
    """The numbers of clients to which a track may shrink: halves, and with `fine` three quarters as well.

    >>> track_sizes(84, 8, fine=False), track_sizes(84, 8, fine=True)
    ([84, 42, 21, 11, 6], [84, 63, 42, 32, 21, 16, 11, 9, 6])
    """
    found = [clients]
    while clients > smallest:
        found += [round_up(3 * clients, 4) // 4] if fine else []
        clients = round_up(clients, 2) // 2
        found.append(clients)
    return found


class _Progress:
    """How many steps of a track are done, and how many clients it still has."""

    def __init__(self, track: int, steps: Sequence[int]) -> None:
        self.track, self.steps, self.clients, self.done = track, steps, len(steps), 0

    @property
    def steps_left(self) -> int:
        """Until the last client has finished."""
        return self.steps[0] - self.done

    @property
    def steps_until_one_finishes(self) -> int:
        return self.steps[self.clients - 1] - self.done

    def shrink(self, allowed: Sequence[int] | None) -> None:
        """Drop clients that have finished: all of them, or as many as leave one of the allowed numbers of clients."""
        needed = bisect_left(self.steps, -self.done, hi=self.clients, key=neg)  # in falling order
        self.clients = needed if allowed is None else min(size for size in allowed if size >= needed)

    def steps_until_it_shrinks(self, allowed: Sequence[int]) -> int:
        """Until so many clients have finished that the next smaller of the allowed numbers is enough."""
        smaller = max((size for size in allowed if size < self.clients), default=0)
        return self.steps[smaller] - self.done

    def part(self, steps: int, ragged: bool) -> Part:
        """The next part of the track, which then counts as done."""
        made = Part(self.track, self.clients, self.done, steps, ragged)
        self.done += steps
        return made


def groups(steps: Sequence[int], latency_clients: int) -> list[Group]:
    """Divide clients, given by their steps in falling order, into groups and tracks.

    A GPU trains `latency_clients` clients in the time of one; 0 means that there is no GPU, and all clients are one
    track. On a GPU clients with few steps should not wait for those with many. So where their steps differ much,
    clients that fill the GPU are four groups of one size, which train one after another with the same programs. Of
    clients that do not fill it, the eighth with the most steps is a track of its own beside the others: its many
    steps take long however few clients it has.

    >>> [group.tracks for group in groups([20, 4, 3], latency_clients=0)]
    [[slice(0, 3, None)]]
    >>> [group.tracks for group in groups([20] * 8 + [5] * 8, latency_clients=1)]
    [[slice(0, 4, None)], [slice(4, 8, None)], [slice(8, 12, None)], [slice(12, 16, None)]]
    >>> [group.tracks for group in groups([20] * 8 + [5] * 8, latency_clients=2)]
    [[slice(0, 4, None), slice(4, 16, None)]]
    """
    clients = len(steps)
    all_clients = slice(0, clients)
    if latency_clients == 0:
        return [Group([all_clients], latency_clients, smallest=1, ragged_steps=1)]
    wasteful = 4 * sum(steps) <= 3 * clients * steps[0]
    if clients >= FULL_FACTOR * latency_clients:
        size = -(-clients // 4) if wasteful else clients
        quarters = [slice(low, min(low + size, clients)) for low in range(0, clients, size)]
        return [
            Group([quarter], latency_clients, smallest=-(-size // 4), ragged_steps=RAGGED_STEPS_FULL)
            for quarter in quarters
        ]
    longest = round_up(clients // 8, 4)  # so that the inputs of the second track begin at a multiple of 16 bytes
    split = wasteful and clients >= SPLIT_FROM
    tracks = [slice(0, longest), slice(longest, clients)] if split else [all_clients]
    return [Group(tracks, latency_clients, min(latency_clients, SMALLEST_TRACK), RAGGED_STEPS)]


def bucket(number: int, largest: int, waste: int) -> int:
    """Round a number up to one of few values: to `largest` if that is at most `waste` times as large; else to a power
    of two, or to one and a half times a power of two.

    >>> [bucket(n, 100, 1) for n in (3, 5, 13, 70, 100)]
    [3, 6, 16, 96, 100]
    >>> [bucket(n, 100, 8) for n in (3, 12, 13, 70)]
    [3, 12, 100, 100]
    """
    power = 1 << max(0, number - 1).bit_length()
    between = 3 * power // 4
    return largest if waste * number >= largest else min(largest, between if between >= number else power)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below the number.

    >>> round_up(109, 8), round_up(112, 8)
    (112, 112)
    """
    return -(-number // multiple) * multiple


def padded_steps(steps: int) -> int:
    """For how many steps memory is needed: the last ragged part may go beyond a client's last step."""
    return round_up(steps, RAGGED_STEPS)

"""How a visit of many clients is cut into parts: who trains in each, and how many steps it has."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import neg
from typing import NamedTuple

# Steps of a part that is recorded: of clients that all take as many, of others, and of others that fill a GPU.
LONG, SHORT, BRIEF = 64, 8, 2
GRAIN = 4  # steps: short parts that last longer or end sooner are multiples of it, so that there are few of them
FULL = 16  # crowds fill a GPU
HANDFUL = 8  # clients: a step of fewer takes hardly less time, if they are a crowd
MANY = 16  # clients: of so many, some may be worth a track of their own


class Part(NamedTuple):
    track: int  # by its first client
    clients: int  # so many of the track, those with the most steps
    first: int  # step
    steps: int
    ragged: bool  # may some of them have finished, and stand still?


Stage = list[Part]  # that go side by side


class Group(NamedTuple):
    """Clients that train at the same time: those of a track in step, tracks side by side."""

    tracks: list[slice]  # in falling order of steps
    crowd: int
    least: int  # clients: a track that is down to so many shrinks no more
    short: int  # steps of a part, if not all clients take as many

    @property
    def light(self) -> bool:
        """Do they leave room on a GPU? Then steps are short, and their shapes compiled soon."""
        return self.short == SHORT

    def stages(self, steps: Sequence[int], few_shapes: bool, again: bool = False) -> Iterator[Stage]:
        """One after another, until every track has ended.

        With few shapes the number of clients is one of few: those of `sizes`. Parts that go side by side take about
        as long: what has few clients gets on by more steps. If the same clients come `again` and again, each part may
        be as long as its size is the right one, since then there are few of them.

        >>> (everybody,) = groups([3, 3, 1], crowd=0)
        >>> [(part.clients, part.steps) for (part,) in everybody.stages([3, 3, 1], few_shapes=False)]
        [(3, 1), (2, 2)]
        >>> [(part.clients, part.steps) for (part,) in everybody.stages([3, 3, 1], few_shapes=True)]
        [(3, 1), (2, 1), (2, 1)]
        >>> steps = [24] * 4 + [16] * 9 + [7] * 3
        >>> (both,) = groups(steps, crowd=2)
        >>> for stage in both.stages(steps, few_shapes=True):
        ...     print([(part.clients, part.first, part.steps) for part in stage])
        [(4, 0, 12), (12, 0, 8)]
        [(4, 12, 12), (9, 8, 8)]
        >>> for stage in both.stages(steps, few_shapes=True, again=True):
        ...     print([(part.clients, part.first, part.steps) for part in stage])
        [(4, 0, 24), (12, 0, 7)]
        [(9, 7, 9)]
        """
        going = [_Progress(track.start, steps[track]) for track in self.tracks]
        allowed = {track.track: sizes(track.clients, self.least, fine=self.light) for track in going}
        even = going[0].steps[0] == going[-1].steps[-1]
        while going := [track for track in going if track.left > 0]:
            for track in going:
                track.shrink(allowed[track.track] if few_shapes else None)
            if not few_shapes:
                yield [track.part(track.together, False) for track in going]
            elif even or again:
                yield [track.part(min(LONG, track.lasts(allowed[track.track])), not even) for track in going]
            elif len(going) == 1 and going[0].clients <= self.least and self.light:
                yield [going[0].part(_long(going[0].left), True)]  # it shrinks no more: fewer parts to launch
            else:
                slowest = max(self._time(track.clients) for track in going)
                yield [track.part(self._fitting(track, slowest), True) for track in going]

    def _fitting(self, track: _Progress, slowest: int) -> int:
        """Steps of a track in about the time in which the slowest takes a short part; no more than it needs."""
        grain = min(GRAIN, self.short)
        fitting = grain * round(self.short * slowest / (grain * self._time(track.clients)))
        return min(fitting, up(track.left, grain))

    def _time(self, clients: int) -> int:
        """Of a step, in some unit. On an H200, where a crowd was 21, a round of 100 equal clients (2.67 ms) and a
        ragged one in a single track (6.51 ms) fit 58 + 0.72 * clients microseconds."""
        return 4 * self.crowd + clients


def _long(left: int) -> int:
    """Steps of a part of a track that shrinks no more: one of few numbers."""
    return min(LONG, max(GRAIN, 1 << left.bit_length() - 1))


def sizes(clients: int, least: int, fine: bool) -> list[int]:
    """How many clients of a track may be left: halves, and three quarters if it is to be fine.

    >>> sizes(84, 8, fine=False), sizes(84, 8, fine=True)
    ([84, 42, 21, 11, 6], [84, 63, 42, 32, 21, 16, 11, 9, 6])
    """
    found = [clients]
    while clients > least:
        found += [up(3 * clients, 4) // 4] if fine else []
        clients = up(clients, 2) // 2
        found.append(clients)
    return found


class _Progress:
    """How far a track has come."""

    def __init__(self, track: int, steps: Sequence[int]) -> None:
        self.track, self.steps, self.clients, self.at = track, steps, len(steps), 0

    @property
    def left(self) -> int:
        """Steps of the longest client."""
        return self.steps[0] - self.at

    @property
    def together(self) -> int:
        """Steps until the first of the clients has finished."""
        return self.steps[self.clients - 1] - self.at

    def shrink(self, allowed: Sequence[int] | None) -> None:
        """Let clients that have finished go: whoever has, or as many as leave one of the sizes that are allowed."""
        needed = bisect_left(self.steps, -self.at, hi=self.clients, key=neg)  # in falling order
        self.clients = needed if allowed is None else min(size for size in allowed if size >= needed)

    def lasts(self, allowed: Sequence[int]) -> int:
        """Steps until the next smaller of these sizes is enough."""
        smaller = max((size for size in allowed if size < self.clients), default=0)
        return self.steps[smaller] - self.at

    def part(self, steps: int, ragged: bool) -> Part:
        made = Part(self.track, self.clients, self.at, steps, ragged)
        self.at += steps
        return made


def groups(steps: Sequence[int], crowd: int) -> list[Group]:
    """Clients with so many steps, in falling order, as those that train side by side; one group after another.

    A GPU trains a `crowd` in the time of one (0: there is none). So that the short do not wait for the long: what
    fills it goes in quarters, one after another, all of the same few shapes; of what does not, the eighth with the
    most steps goes beside the others, since its many steps take their time however few clients there are.

    >>> [group.tracks for group in groups([20, 4, 3], crowd=0)]
    [[slice(0, 3, None)]]
    >>> [group.tracks for group in groups([20] * 8 + [5] * 8, crowd=1)]
    [[slice(0, 4, None)], [slice(4, 8, None)], [slice(8, 12, None)], [slice(12, 16, None)]]
    >>> [group.tracks for group in groups([20] * 8 + [5] * 8, crowd=2)]
    [[slice(0, 4, None), slice(4, 16, None)]]
    """
    clients = len(steps)
    everybody = slice(0, clients)
    if crowd == 0:
        return [Group([everybody], crowd, least=1, short=1)]
    wasteful = 4 * sum(steps) <= 3 * clients * steps[0]
    if clients >= FULL * crowd:
        size = -(-clients // 4) if wasteful else clients
        quarters = [slice(low, min(low + size, clients)) for low in range(0, clients, size)]
        return [Group([quarter], crowd, least=-(-size // 4), short=BRIEF) for quarter in quarters]
    longest = up(clients // 8, 4)  # so that what the others read begins at a multiple of 16 bytes
    apart = wasteful and clients >= MANY
    tracks = [slice(0, longest), slice(longest, clients)] if apart else [everybody]
    return [Group(tracks, crowd, min(crowd, HANDFUL), SHORT)]


def few(number: int, largest: int, waste: int) -> int:
    """A number not below the given one, but one of few: the largest of all if it is at most `waste` times as large;
    else a power of two, or one and a half of it.

    >>> [few(n, 100, 1) for n in (3, 5, 13, 70, 100)]
    [3, 6, 16, 96, 100]
    >>> [few(n, 100, 8) for n in (3, 12, 13, 70)]
    [3, 12, 100, 100]
    """
    power = 1 << max(0, number - 1).bit_length()
    between = 3 * power // 4
    return largest if waste * number >= largest else min(largest, between if between >= number else power)


def up(number: int, multiple: int) -> int:
    """The next multiple that is not below the number.

    >>> up(109, 8), up(112, 8)
    (112, 112)
    """
    return -(-number // multiple) * multiple


def room(steps: int) -> int:
    """Steps that there must be room for, if parts may be longer than what is left."""
    return up(steps, SHORT)

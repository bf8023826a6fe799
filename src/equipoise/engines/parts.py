"""How a visit of many clients is cut into parts: who trains in each, and how many steps it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Steps of a part that is recorded: of clients that all take as many, of others, and of others that fill a GPU.
LONG, SHORT, BRIEF = 64, 8, 2
FULL = 16  # crowds fill a GPU


class Part(NamedTuple):
    clients: int  # so many of them, those with the most steps
    first: int  # step
    steps: int
    ragged: bool  # may some of them have finished, and stand still?


class Track(NamedTuple):
    """Clients that begin together."""

    clients: slice
    crowd: int
    short: int  # steps of a part, if they do not all take as many

    def parts(self, steps: Sequence[int], few_shapes: bool) -> Iterator[Part]:
        """With few shapes the number of clients is only ever halved, on a GPU not below a quarter or a crowd.

        >>> list(Track(slice(0, 3), 0, 1).parts([3, 3, 1], few_shapes=False))
        [Part(clients=3, first=0, steps=1, ragged=False), Part(clients=2, first=1, steps=2, ragged=False)]
        >>> list(Track(slice(0, 3), 0, 1).parts([2, 1, 1], few_shapes=True))
        [Part(clients=3, first=0, steps=1, ragged=True), Part(clients=1, first=1, steps=1, ragged=True)]
        >>> list(Track(slice(0, 3), 4, 8).parts([10, 8, 3], few_shapes=True))
        [Part(clients=3, first=0, steps=8, ragged=True), Part(clients=3, first=8, steps=8, ragged=True)]
        """
        steps = steps[self.clients]
        clients, at, longest = len(steps), 0, steps[0]
        even = steps[-1] == longest
        least = max(self.crowd, -(-clients // 4)) if self.crowd else 1
        while at < longest:
            needed = sum(mine > at for mine in steps[:clients])
            if not few_shapes:
                clients = needed
                yield (part := Part(clients, at, steps[clients - 1] - at, False))
            else:
                while 2 * needed <= clients and clients > least:
                    clients = (clients + 1) // 2
                yield (part := Part(clients, at, min(LONG, longest - at) if even else self.short, not even))
            at += part.steps


def tracks(steps: Sequence[int], crowd: int) -> list[Track]:
    """Clients with so many steps, in falling order, as those that train together.

    A GPU trains a `crowd` in the time of one (0: there is none). What fills it goes in quarters, one after another,
    so that the short do not wait for the long, and all quarters have the same few shapes.

    >>> tracks([20, 4, 3], crowd=0)
    [Track(clients=slice(0, 3, None), crowd=0, short=1)]
    >>> [track.clients for track in tracks([20] * 8 + [5] * 8, crowd=1)]
    [slice(0, 4, None), slice(4, 8, None), slice(8, 12, None), slice(12, 16, None)]
    """
    everybody = len(steps)
    if crowd == 0:
        return [Track(slice(0, everybody), 0, 1)]
    if everybody < FULL * crowd:
        return [Track(slice(0, everybody), crowd, SHORT)]
    wasteful = 4 * sum(steps) <= 3 * everybody * steps[0]
    size = -(-everybody // 4) if wasteful else everybody
    return [Track(slice(low, min(low + size, everybody)), crowd, BRIEF) for low in range(0, everybody, size)]


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

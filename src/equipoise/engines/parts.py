"""How a visit of many clients is cut into parts: who trains in each, and how many steps it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Steps of a part that is recorded: of clients that all take as many, of others, and of stacks that fill a GPU.
LONG, SHORT, BRIEF = 64, 8, 2
FULL = 8  # crowds fill a GPU


class Track(NamedTuple):
    clients: slice
    least: int  # clients that take no longer than fewer would; 0 where nothing is recorded
    short: int  # steps of a part, where clients do not all take as many


class Part(NamedTuple):
    clients: int  # so many of them, those with the most steps
    first: int  # step
    steps: int
    ragged: bool  # may some of them have finished, and stand still?


def tracks(steps: Sequence[int], crowd: int) -> list[Track]:
    """Clients with so many steps, in falling order, as those that begin and end together.

    A GPU trains a `crowd` of clients in the time of one (0: there is none). Where a few have far more steps than the
    others, a crowd of these goes ahead alone. What fills a GPU goes in quarters, so that the short do not wait for
    the long, and their programs have few shapes.

    >>> [track.clients for track in tracks([90, 80, 20, 20], crowd=2)]
    [slice(0, 2, None), slice(2, 4, None)]
    >>> [track.clients for track in tracks([20, 20, 19, 19], crowd=2)]
    [slice(0, 4, None)]
    >>> tracks([9, 8, 7, 6, 5, 4, 3, 2], crowd=1)[:2]
    [Track(clients=slice(0, 2, None), least=1, short=2), Track(clients=slice(2, 4, None), least=1, short=2)]
    """
    everybody = len(steps)
    if crowd == 0:
        return [Track(slice(0, everybody), 0, 1)]
    if everybody >= FULL * crowd:
        wasteful = 4 * sum(steps) <= 3 * everybody * steps[0]
        unit = -(-everybody // 4) if wasteful else everybody
        least = max(crowd, -(-unit // 4))
        return [Track(slice(low, min(low + unit, everybody)), least, BRIEF) for low in range(0, everybody, unit)]
    if crowd < everybody and 3 * steps[crowd] <= 2 * steps[0]:
        return [Track(slice(0, crowd), crowd, SHORT), Track(slice(crowd, everybody), crowd, SHORT)]
    return [Track(slice(0, everybody), crowd, SHORT)]


def parts(steps: Sequence[int], few_shapes: bool, least: int = 0, short: int = 1) -> Iterator[Part]:
    """The parts of a visit of clients with so many steps, in falling order.

    With few shapes the number of clients is only ever halved, and not below the `least` that is worth it; what is
    recorded comes in parts of equal length.

    >>> list(parts([3, 3, 1], few_shapes=False))
    [Part(clients=3, first=0, steps=1, ragged=False), Part(clients=2, first=1, steps=2, ragged=False)]
    >>> list(parts([2, 1, 1], few_shapes=True))
    [Part(clients=3, first=0, steps=1, ragged=True), Part(clients=1, first=1, steps=1, ragged=True)]
    >>> list(parts([10, 8, 3], few_shapes=True, least=4, short=8))
    [Part(clients=3, first=0, steps=8, ragged=True), Part(clients=3, first=8, steps=8, ragged=True)]
    """
    clients, at, longest = len(steps), 0, steps[0]
    even = steps[-1] == longest
    while at < longest:
        needed = sum(mine > at for mine in steps[:clients])
        if not few_shapes:
            clients = needed
            yield (part := Part(clients, at, steps[clients - 1] - at, False))
        else:
            while 2 * needed <= clients and clients > least:
                clients = (clients + 1) // 2
            yield (part := Part(clients, at, min(LONG, longest - at) if even else short, not even))
        at += part.steps


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

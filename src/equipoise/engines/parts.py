"""How a visit of many clients is cut into parts: who trains in each, and how many steps it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Of programs that are recorded: steps of a part, of clients that all take as many, and of others; and clients that a
# GPU trains in the time of one.
LONG, SHORT, CROWD = 64, 8, 8


class Part(NamedTuple):
    clients: int  # so many of them, those with the most steps
    first: int  # step
    steps: int
    ragged: bool  # may some of them have finished, and stand still?


def parts(steps: Sequence[int], few_shapes: bool, recorded: bool = False) -> Iterator[Part]:
    """The parts of a visit of clients with so many steps, in falling order.

    With few shapes the number of clients is only ever halved; what is recorded comes in parts of equal length.

    >>> list(parts([3, 3, 1], few_shapes=False))
    [Part(clients=3, first=0, steps=1, ragged=False), Part(clients=2, first=1, steps=2, ragged=False)]
    >>> list(parts([2, 1, 1], few_shapes=True))
    [Part(clients=3, first=0, steps=1, ragged=True), Part(clients=1, first=1, steps=1, ragged=True)]
    >>> list(parts([10, 8, 3], few_shapes=True, recorded=True))
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
            while 2 * needed <= clients and not (recorded and clients <= CROWD):
                clients = (clients + 1) // 2
            length = min(LONG, longest - at) if even else SHORT if recorded else 1
            yield (part := Part(clients, at, length, not even))
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

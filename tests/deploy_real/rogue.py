"""A site with a valid key whose answers are wrong: first a wrong shape, then not-a-number, then too many bytes.

python rogue.py SERVER NAME
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from equipoise.deploy.join import Way, join
from equipoise.deploy.site import Site, reading
from equipoise.deploy.transport.wire import LIMIT, Packet


class Rogue(Site):
    def answer(self, request: Packet, limit: int = LIMIT) -> Packet:
        reply = super().answer(request, limit)
        if request.kind != "train" or reply.kind != "reply":
            return reply
        arrays = dict(reply.arrays)
        name = max(arrays, key=lambda key: arrays[key].size)
        match request.header["round"]:
            case 0:
                arrays[name] = np.zeros((3, 3))
            case 1:
                arrays[name] = np.full_like(arrays[name], np.nan)
            case _:
                arrays[name] = np.zeros(2**20)
        return Packet(reply.kind, reply.header, arrays)


def main(server: str, name: str) -> None:
    site = Rogue(name, reading(Path(f"{name}.csv")), Path("sites") / name)
    join(site, Way(server, Path("certs") / name), print)


if __name__ == "__main__":
    main(*sys.argv[1:])

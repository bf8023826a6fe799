"""Sites within this process: the client half of a deployment, driven over the bytes that would travel.

Real messages are encoded, decoded and checked as between a server and its sites; only the network is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.federation import Federation
from equipoise.core.method import written_name
from equipoise.core.tree import Tree
from equipoise.data.samples import Samples
from equipoise.deploy.agreement import Agreement
from equipoise.deploy.flower import Flower, Patience
from equipoise.deploy.roll import Roll
from equipoise.deploy.site import Site
from equipoise.deploy.transport.carrier import DAY
from equipoise.deploy.transport.wire import Packet, decode, encode
from equipoise.deploy.versions import NEVER, Versions

RUN = "check"


class Direct:
    """A carrier that hands every packet, as bytes, to a site in this process and brings back its answer."""

    def __init__(self, sites: Mapping[int, Site]) -> None:
        self.sites = sites
        self.answers: dict[str, Packet] = {}
        self.sent = 0

    def nodes(self) -> list[int]:
        return list(self.sites)

    def push(self, packets: Mapping[int, Packet], ttl: float = DAY) -> dict[str, int]:
        pushed = {}
        for node, packet in packets.items():
            self.sent += 1
            self.answers[str(self.sent)] = decode(encode(self.sites[node].answer(decode(encode(packet)))))
            pushed[str(self.sent)] = node
        return pushed

    def pull(self, ids: Collection[str]) -> dict[str, Packet]:
        return {name: self.answers.pop(name) for name in list(ids) if name in self.answers}


def without_samples(fed: Federation) -> Federation:
    """The federation as a server has it: no sample of the clients, nor how many they have."""
    fed = replace(fed, held_offsets=None, held_indices=None)
    return replace(fed, x=fed.x[:0], y=fed.y[:0], indices=fed.indices[:0], offsets=torch.arange(fed.clients + 1))


def site_engine(fed: Federation, chain: Chain, folder: Path, model: str, held_out: float = 0.0) -> Flower:
    """The engine of real sites over the clients of a federation; `model` names its network as a config would."""
    names = tuple(f"site_{client}" for client in range(fed.clients))
    own = tuple(written_name(type(method)) for method in chain)
    sites = {}
    for client, name in enumerate(names):
        mine = fed.indices[fed.offsets[client] : fed.offsets[client + 1]]
        samples = Samples(fed.x[mine].numpy(), np.array(fed.classes)[fed.y[mine].numpy()])

        def read(options: object, samples: Samples = samples) -> Samples:
            return samples

        sites[client] = Site(name, read, folder / name, models=(model,), methods=own)
    agreement = Agreement(
        run=RUN,
        roster=names,
        classes=fed.classes,
        shape=tuple(fed.x.shape[1:]),
        dtype=str(fed.x.dtype).removeprefix("torch."),
        mean=fed.mean * fed.x.shape[1],
        std=fed.std * fed.x.shape[1],
        columns=(),
        model=model,
        method=str(chain),
        precision="float64",
        seed=fed.seed,
        held_out=held_out,
    )
    hasty = Patience(deadline=60.0, wait=0.0, minimum=1)
    return Flower(without_samples(fed), agreement, Direct(sites), Roll(names), patience=hasty)


def site_memories(engine: Flower, folder: Path) -> Tree:
    """What the sites keep, in the layout of a simulation's memories."""
    kept: dict[str, list[tuple[int, Tree]]] = {}
    for client, name in enumerate(engine.agreement.roster):
        version = engine.committed.version(client)
        if version != NEVER:
            for method, own in Versions(folder / name / engine.agreement.run).read(version).items():
                kept.setdefault(method, []).append((client, own["rows"]))
    return {
        method: {
            "clients": torch.tensor([client for client, _ in rows]),
            "rows": tree.map(lambda *parts: torch.cat(parts), *(own for _, own in rows)),
        }
        for method, rows in kept.items()
    }

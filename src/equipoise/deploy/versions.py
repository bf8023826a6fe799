"""What a site keeps between messages: the memories of its methods, by (round, phase).

Every request names the version that it builds on and the one that it makes. A repeated request finds its base again
and makes the same version; a reply that the server never used is a version that nobody builds on. So nothing is ever
applied twice, and a server that goes back to its last checkpoint finds the memories of that moment.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save

from equipoise import tree
from equipoise.checkpoint import write_atomically
from equipoise.deploy.wire import WireError
from equipoise.errors import CheckpointError
from equipoise.tree import Tree

KEPT_ROUNDS = 2  # before the one at hand, whatever the server names


class Version(NamedTuple):
    round: int  # -1: before the first
    phase: int


NEVER = Version(-2, 0)  # the version of a client that was never seen


class MemoryLost(WireError):
    """The server names a version that is not here."""


class Versions:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, version: Version) -> Tree:
        if version == NEVER:
            return {}
        file = self._file(version)
        try:
            return tree.unflatten(load(file.read_bytes()))
        except (OSError, SafetensorError) as error:
            have = ", ".join(f"round {v.round + 1}.{v.phase}" for v in self.all()) or "nothing"
            raise MemoryLost(
                f"the memory of round {version.round + 1}.{version.phase} is not in {self.folder}, which has {have}"
            ) from error

    def write(self, version: Version, needed: Collection[Version], memory: Tree) -> None:
        """Keep a version, and forget the earlier ones but those needed: what the server may yet come back to."""
        content = save({name: leaf.contiguous() for name, leaf in tree.flatten(memory).items()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._file(version), content)
        except OSError as error:
            raise CheckpointError(f"cannot write {self._file(version)}: {error.strerror or error}") from error
        earlier = [v for v in self.all() if v.round < version.round]
        last = {v.round: v for v in earlier}  # they come in order: of each round the last
        kept = {*needed, *list(last.values())[-KEPT_ROUNDS:]}
        for old in earlier:
            if old not in kept:
                self._file(old).unlink(missing_ok=True)

    def all(self) -> list[Version]:
        found = [re.fullmatch(r"round-(\d+)-(\d+)\.safetensors", file.name) for file in self.folder.glob("round-*")]
        return sorted(Version(int(m[1]) - 1, int(m[2])) for m in found if m)

    def _file(self, version: Version) -> Path:
        return self.folder / f"round-{version.round + 1:08d}-{version.phase:04d}.safetensors"

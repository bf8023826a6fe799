"""The memories that methods keep at a site between messages, one file for each version (round, phase).

Every request names the version that it builds on and the version that it makes. A repeated request reads the same
old version and writes the same new one. If the server never used a reply, no later request builds on its version. So
nothing is applied twice, and a server that goes back to its last checkpoint finds the memories of that time.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save

from equipoise.core import tree
from equipoise.core.errors import CheckpointError
from equipoise.core.tree import Tree
from equipoise.deploy.transport.wire import WireError
from equipoise.runs.checkpoint import write_atomically

KEPT_ROUNDS = 2  # earlier rounds whose last version is kept in any case


class Version(NamedTuple):
    round: int  # -1 means before the first round
    phase: int


NEVER = Version(-2, 0)  # the version of a client that has no memories yet


class MemoryLost(WireError):
    """The server builds on a version that this site does not have."""


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
        """Write a version, and delete earlier rounds except those in `needed`, to which the server may go back."""
        content = save({name: leaf.contiguous() for name, leaf in tree.flatten(memory).items()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._file(version), content)
        except OSError as error:
            raise CheckpointError(f"cannot write {self._file(version)}: {error.strerror or error}") from error
        earlier = [v for v in self.all() if v.round < version.round]
        last = {v.round: v for v in earlier}  # `all` is sorted, so this is the last version of each round
        kept = {*needed, *list(last.values())[-KEPT_ROUNDS:]}
        for old in earlier:
            if old not in kept:
                self._file(old).unlink(missing_ok=True)

    def all(self) -> list[Version]:
        found = [re.fullmatch(r"round-(\d+)-(\d+)\.safetensors", file.name) for file in self.folder.glob("round-*")]
        return sorted(Version(int(m[1]) - 1, int(m[2])) for m in found if m)

    def _file(self, version: Version) -> Path:
        return self.folder / f"round-{version.round + 1:08d}-{version.phase:04d}.safetensors"

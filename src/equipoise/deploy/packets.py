"""Trees in packets, and what a tree must look like before it is used."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from equipoise import expression, tree
from equipoise.deploy.wire import Packet, WireError
from equipoise.errors import nearest
from equipoise.estimation import SquareLoss
from equipoise.local import Local
from equipoise.method import Chain, Method
from equipoise.methods import METHODS
from equipoise.questions import Question
from equipoise.tree import Tree

# What a site may be asked to train with: also what a method trains with before the first round.
TRAINABLE: dict[str, type[Method]] = {**METHODS, SquareLoss.name: SquareLoss}


def pack(kind: str, header: dict[str, Any], trees: Tree) -> Packet:
    flat = tree.flatten(trees)
    return Packet(kind, header, {name: leaf.detach().cpu().contiguous().numpy() for name, leaf in flat.items()})


def unpack(packet: Packet, expected: Tree, limit: int) -> Tree:
    """The trees of a packet, once they are known to be just what is expected: names, shapes, types, finite values.

    `expected` has the structure, with any tensors of the right shapes and types in it.
    """
    if packet.nbytes > limit:
        raise WireError(f"the message has {packet.nbytes:,} bytes where at most {limit:,} are taken")
    wanted = tree.flatten(expected)
    for name in packet.arrays:
        if name not in wanted:
            raise WireError(f"the message has an array {name!r} that was not asked for; {nearest(name, wanted)}")
    leaves: dict[str, Tensor] = {}
    for name, like in wanted.items():
        if name not in packet.arrays:
            raise WireError(f"the message lacks the array {name!r}")
        leaf = torch.from_numpy(packet.arrays[name])
        if leaf.shape != like.shape or leaf.dtype != like.dtype:
            raise WireError(f"{name} is {_kind(leaf)}, expected {_kind(like)}")
        if not bool(leaf.isfinite().all()):
            raise WireError(f"{name} holds a number that is not finite")
        leaves[name] = leaf
    return _like(expected, leaves)


def _kind(leaf: Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def _like(expected: Tree, leaves: dict[str, Tensor], prefix: str = "") -> Tree:
    """Empty trees do not travel; here they come back."""
    return {
        key: _like(value, leaves, f"{prefix}{key}/") if isinstance(value, dict) else leaves[prefix + key]
        for key, value in expected.items()
    }


# -- settings, as JSON ----------------------------------------------------------------------------------------------
def write_local(local: Local) -> dict[str, Any]:
    return asdict(local)


def read_local(settings: dict[str, Any]) -> Local:
    try:
        return Local(**{**settings, "betas": tuple(settings["betas"])})
    except (TypeError, KeyError) as error:
        raise WireError(f"the settings of local training cannot be read ({error})") from error


def read_chain(text: str) -> Chain:
    return Chain(*expression.parse(text, TRAINABLE))


def write_question(question: Question) -> dict[str, Any]:
    return {"kind": type(question).__name__, **asdict(question)}


def read_question(settings: dict[str, Any]) -> Question:
    """Only questions that this installation knows: nothing is imported by a name from the wire."""
    known = {kind.__name__: kind for kind in _subclasses(Question)}
    kind = settings.get("kind")
    if not isinstance(kind, str) or kind not in known:
        raise WireError(f"the question {kind!r} is unknown here; {nearest(kind, known)}")
    try:
        return known[kind](**{name: value for name, value in settings.items() if name != "kind"})
    except TypeError as error:
        raise WireError(f"the question {kind} cannot be read ({error})") from error


def _subclasses(kind: type[Question]) -> list[type[Question]]:
    below = kind.__subclasses__()
    return below + [deeper for one in below for deeper in _subclasses(one)]

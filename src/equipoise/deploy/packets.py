"""Trees, settings, chains and questions in packets, and the checks that they pass before they are used."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.errors import NotAllowed, nearest
from equipoise.core.local import Local
from equipoise.core.method import reference
from equipoise.core.questions import Question
from equipoise.core.tree import Tree
from equipoise.deploy.transport.wire import Packet, WireError
from equipoise.methods.registry import parse


def pack(kind: str, header: dict[str, Any], trees: Tree) -> Packet:
    flat = tree.flatten(trees)
    return Packet(kind, header, {name: leaf.detach().cpu().contiguous().numpy() for name, leaf in flat.items()})


def unpack(packet: Packet, expected: Tree, limit: int) -> Tree:
    """The trees of a packet, after their names, shapes and types are checked, and that all values are finite.

    `expected` is a tree with the expected names; its tensors have the expected shapes and types.
    """
    if packet.nbytes > limit:
        raise WireError(f"the message has {packet.nbytes:,} bytes, expected at most {limit:,}")
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
            raise WireError(f"{name} is {_type_and_shape(leaf)}, expected {_type_and_shape(like)}")
        if not bool(leaf.isfinite().all()):
            raise WireError(f"{name} holds a number that is not finite")
        leaves[name] = leaf
    return _with_structure(expected, leaves)


def _type_and_shape(leaf: Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def _with_structure(expected: Tree, leaves: dict[str, Tensor], prefix: str = "") -> Tree:
    """The leaves in the structure of `expected`, with its empty branches, which a packet cannot hold."""
    return {
        key: _with_structure(value, leaves, f"{prefix}{key}/") if isinstance(value, dict) else leaves[prefix + key]
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


def read_chain(text: str, allow: Collection[str] = ()) -> Chain:
    """The chain that the server names. A method outside Equipoise is refused before its code is imported, unless
    `allow` names it."""
    return parse(text, allow)


def check_model(name: str, allow: Collection[str]) -> None:
    """Refuse a model outside Equipoise, `package.module:function`, unless `allow` names it."""
    if ":" in name and name not in allow:
        raise NotAllowed(
            f"model {name!r} is code from outside Equipoise, which has not been allowed here; if you trust it,"
            f" allow it with --allow-model {name}"
        )


def write_question(question: Question) -> dict[str, Any]:
    return {"kind": reference(type(question)), **asdict(question)}


def read_question(settings: dict[str, Any]) -> Question:
    """The question that the server asks. Its class must be imported already, with Equipoise or with an allowed
    method: nothing is imported because a question names it."""
    known = {reference(kind): kind for kind in _subclasses(Question)}
    kind = settings.get("kind")
    if not isinstance(kind, str) or kind not in known:
        raise WireError(f"the question {kind!r} is unknown here; {nearest(kind, known)}")
    try:
        return known[kind](**{name: _hashable(value) for name, value in settings.items() if name != "kind"})
    except TypeError as error:
        raise WireError(f"the question {kind} cannot be read ({error})") from error


def _hashable(value: Any) -> Any:
    """A setting with its lists turned back into tuples: JSON has no tuples, and a question must be hashable."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _subclasses(kind: type[Question]) -> list[type[Question]]:
    below = kind.__subclasses__()
    return below + [deeper for one in below for deeper in _subclasses(one)]

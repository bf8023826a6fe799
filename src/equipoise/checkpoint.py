"""Checkpoints: trees of tensors that survive a crash at any moment, and say so when they did not.

One checkpoint is a pair of files, numbered in the order of saving:

    checkpoint-00000007.safetensors   the tensors
    checkpoint-00000007.json          schema version, `meta`, the shape of the trees, sizes and SHA-256

Each is written under another name, synced and renamed, the JSON last: a checkpoint exists from the moment its
JSON does. The last two good ones are kept, so that damage to one never costs the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from equipoise import tree
from equipoise.errors import CheckpointError
from equipoise.tree import Tree

FORMAT = "equipoise checkpoint"
VERSION = 1
KEPT = 2
_PARTIAL = ".partial"  # ends the name of what is being written: never read, removed by the next save
_SCRATCH = "tensors" + _PARTIAL  # a folder, since safetensors writes files of its own naming


def save(folder: Path, trees: dict[str, Tree], meta: dict[str, Any]) -> Path:
    """Write a checkpoint into `folder` and return its JSON file; older ones beyond the last two go.

    `meta` is anything JSON holds. One process at a time may save into a folder.
    """
    structure, tensors = _structure(trees), owned(tree.flatten(trees))
    document = folder / "checkpoint"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        number = max((_number(path) for path in _documents(folder)), default=0) + 1
        document = folder / f"checkpoint-{number:08d}.json"
        data = document.with_suffix(".safetensors")
        partial = folder / _SCRATCH / data.name
        partial.parent.mkdir()
        save_file(tensors, partial)
        partial.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it private; the folder decides
        entry = {"file": data.name, "bytes": partial.stat().st_size, "sha256": _sha256(partial)}
        _commit(partial, data)
        partial.parent.rmdir()
        body = {"format": FORMAT, "version": VERSION, "meta": meta, "trees": structure, "tensors": entry}
        write_atomically(document, json.dumps(body | {"sha256": _digest(body)}, indent=1).encode())
        _prune(folder, document)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            _sweep(folder)  # whatever is half-written goes, so that a full disk gets its room back
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {document}: {reason}; earlier checkpoints are kept") from error
    return document


def load(folder: Path) -> tuple[dict[str, Tree], dict[str, Any]]:
    """The trees, on the CPU, and the meta of the newest good checkpoint in `folder`.

    When a newer one is damaged, `meta["recovered_from"]` is a sentence that says which and how.
    """
    faults: list[str] = []
    for document in reversed(_documents(folder)):
        body, fault = _read(document)
        if fault is not None:
            faults.append(fault)
            continue
        # A mapped tensor starts anywhere in the file, and kernels may round differently off a 64-byte
        # boundary: fresh memory keeps a resumed run bit-equal.
        leaves = {name: leaf.clone() for name, leaf in load_file(_tensor_file(document)).items()}
        meta = dict(body["meta"])
        if faults:
            meta["recovered_from"] = "; ".join(faults) + f"; {document.name} is used instead"
        return _assemble(body["trees"], leaves), meta
    if faults:
        raise CheckpointError("no checkpoint can be used: " + "; ".join(faults))
    raise CheckpointError(f"{folder} holds no checkpoint")


def exists(folder: Path) -> bool:
    """Was a checkpoint ever completed in `folder`, be it good or damaged?"""
    return bool(_documents(folder))


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` so that a crash at any moment leaves either the old file or the new one, whole."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        partial.write_bytes(content)
        _commit(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _commit(partial: Path, path: Path) -> None:
    """Sync a finished file and give it its name; the name lasts only once the folder is synced too."""
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _documents(folder: Path) -> list[Path]:
    """The JSON files of the checkpoints in `folder`, oldest first."""
    return sorted((path for path in folder.glob("checkpoint-*.json") if _number(path) >= 0), key=_number)


def _number(document: Path) -> int:
    match = re.fullmatch(r"checkpoint-(\d+)\.json", document.name)
    return int(match[1]) if match else -1


def _tensor_file(document: Path) -> Path:
    return document.with_suffix(".safetensors")


def _sweep(folder: Path) -> None:
    """Remove what an interrupted save left: partial files, and tensors whose JSON never came."""
    shutil.rmtree(folder / _SCRATCH, ignore_errors=True)
    for path in folder.glob(f"checkpoint-*{_PARTIAL}"):
        path.unlink(missing_ok=True)
    for path in folder.glob("checkpoint-*.safetensors"):
        if not path.with_suffix(".json").exists():
            path.unlink(missing_ok=True)


def _prune(folder: Path, newest: Path) -> None:
    """Keep `newest` and the good one before it; only then is anything older in nobody's way."""
    good = 1
    for document in reversed([path for path in _documents(folder) if path != newest]):
        if good < KEPT and _read(document)[1] is None:
            good += 1
            continue
        # The JSON goes first: without it the tensors are a stray, never a broken checkpoint.
        document.unlink(missing_ok=True)
        _tensor_file(document).unlink(missing_ok=True)


def _read(document: Path) -> tuple[dict[str, Any], str | None]:
    """The content, and what is damaged (None when nothing is); a file that is not ours is refused."""
    try:
        body = json.loads(document.read_bytes())
        fault = _fault(document, body)
    except (OSError, ValueError) as error:
        return {}, f"{document} cannot be read ({error})"
    return body, fault


def _fault(document: Path, body: Any) -> str | None:
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{document} is not an Equipoise checkpoint")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{document} has schema version {body.get('version')} and this Equipoise reads version {VERSION}"
            ": use the release that wrote it, or a newer one"
        )
    if body.get("sha256") != _digest({key: value for key, value in body.items() if key != "sha256"}):
        return f"{document} does not match its own SHA-256"
    data, entry = _tensor_file(document), body["tensors"]
    if not data.is_file():
        return f"{data} is missing"
    if (size := data.stat().st_size) != entry["bytes"]:
        return f"{data} has {size} bytes where {entry['bytes']} were written"
    if _sha256(data) != entry["sha256"]:
        return f"{data} does not match its SHA-256"
    return None


def _digest(body: dict[str, Any]) -> str:
    """Of the JSON itself: a flipped digit in the meta must not pass for another round."""
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _structure(part: Tree) -> dict[str, Any]:
    """The tree with every tensor replaced by its dtype and shape, as text: empty dicts and order survive."""
    for key in part:
        if "/" in key:
            raise ValueError(f"the key {key!r} of a tree contains '/', which joins keys in a file")
    return {
        key: _structure(value)
        if isinstance(value, dict)
        else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for key, value in part.items()
    }


def _assemble(structure: dict[str, Any], leaves: dict[str, Tensor], prefix: str = "") -> Tree:
    return {
        key: _assemble(value, leaves, f"{prefix}{key}/") if isinstance(value, dict) else leaves[prefix + key]
        for key, value in structure.items()
    }


def owned(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, each alone in a storage of its own size, as safetensors demands."""
    seen: set[int] = set()
    owned: dict[str, Tensor] = {}
    for name, leaf in leaves.items():
        flat = leaf.detach().cpu().contiguous()
        storage = flat.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != flat.numel() * flat.element_size():
            flat = flat.clone()
        seen.add(flat.untyped_storage().data_ptr())
        owned[name] = flat
    return owned

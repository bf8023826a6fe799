"""Checkpoints: trees of tensors on disk, safe against a crash at any moment, and checked for damage when read.

One checkpoint is a pair of files, numbered in the order of saving:

    checkpoint-00000007.safetensors   the tensors
    checkpoint-00000007.json          schema version, `meta`, the shape of the trees, sizes and SHA-256

Each file is written under a temporary name, synced and renamed. The JSON comes last: a checkpoint exists from the
moment its JSON does. The last two good checkpoints are kept, so that damage to one of them does not cost the run.
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

from equipoise.core import tree
from equipoise.core.errors import CheckpointError
from equipoise.core.tree import Tree

FORMAT = "equipoise checkpoint"
VERSION = 1
KEPT = 2
_PARTIAL = ".partial"  # suffix of a file that is being written; never read, and removed by the next save
_SCRATCH = "tensors" + _PARTIAL  # a folder, since safetensors makes temporary files with names of its own


def save(folder: Path, trees: dict[str, Tree], meta: dict[str, Any]) -> Path:
    """Write a checkpoint into `folder`, remove all but the last two good ones, and return the path of its JSON file.

    `meta` may hold anything that JSON can. Only one process at a time may save into a folder.
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
        partial.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it private; use the folder's permissions
        entry = {"file": data.name, "bytes": partial.stat().st_size, "sha256": _sha256(partial)}
        _commit(partial, data)
        partial.parent.rmdir()
        body = {"format": FORMAT, "version": VERSION, "meta": meta, "trees": structure, "tensors": entry}
        write_atomically(document, json.dumps(body | {"sha256": _digest(body)}, indent=1).encode())
        _prune(folder, document)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            _sweep(folder)  # frees the space of half-written files on a full disk
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {document}: {reason}; earlier checkpoints are kept") from error
    return document


def load(folder: Path) -> tuple[dict[str, Tree], dict[str, Any]]:
    """Return the trees (on the CPU) and the `meta` of the newest good checkpoint in `folder`.

    If newer checkpoints are damaged, `meta["recovered_from"]` is a sentence that names them and their damage.
    """
    faults: list[str] = []
    for document in reversed(_documents(folder)):
        body, fault = _read(document)
        if fault is not None:
            faults.append(fault)
            continue
        # A memory-mapped tensor starts at any address, and kernels may round differently if it is not aligned to
        # 64 bytes. A copy in fresh memory is aligned, which keeps a resumed run bit-equal.
        leaves = {name: leaf.clone() for name, leaf in load_file(_tensor_file(document)).items()}
        meta = dict(body["meta"])
        if faults:
            meta["recovered_from"] = "; ".join(faults) + f"; {document.name} is used instead"
        return _assemble(body["trees"], leaves), meta
    if faults:
        raise CheckpointError("no checkpoint can be used: " + "; ".join(faults))
    raise CheckpointError(f"{folder} holds no checkpoint")


def exists(folder: Path) -> bool:
    """Whether `folder` holds a completed checkpoint, good or damaged."""
    return bool(_documents(folder))


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` so that a crash at any moment leaves either the whole old file or the whole new one."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        partial.write_bytes(content)
        _commit(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _commit(partial: Path, path: Path) -> None:
    """Sync a finished file and rename it to `path`; the new name survives a crash only after a sync of the folder."""
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the content of a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _documents(folder: Path) -> list[Path]:
    """Return the JSON files of the checkpoints in `folder`, oldest first."""
    return sorted((path for path in folder.glob("checkpoint-*.json") if _number(path) >= 0), key=_number)


def _number(document: Path) -> int:
    match = re.fullmatch(r"checkpoint-(\d+)\.json", document.name)
    return int(match[1]) if match else -1


def _tensor_file(document: Path) -> Path:
    return document.with_suffix(".safetensors")


def _sweep(folder: Path) -> None:
    """Remove what an interrupted save left behind: partial files, and tensors without a JSON file."""
    shutil.rmtree(folder / _SCRATCH, ignore_errors=True)
    for path in folder.glob(f"checkpoint-*{_PARTIAL}"):
        path.unlink(missing_ok=True)
    for path in folder.glob("checkpoint-*.safetensors"):
        if not path.with_suffix(".json").exists():
            path.unlink(missing_ok=True)


def _prune(folder: Path, newest: Path) -> None:
    """Remove all checkpoints but `newest` and the newest good one before it."""
    good = 1
    for document in reversed([path for path in _documents(folder) if path != newest]):
        if good < KEPT and _read(document)[1] is None:
            good += 1
            continue
        # Remove the JSON first: tensors without a JSON file are a leftover, not a damaged checkpoint.
        document.unlink(missing_ok=True)
        _tensor_file(document).unlink(missing_ok=True)


def _read(document: Path) -> tuple[dict[str, Any], str | None]:
    """Return the JSON content and a sentence about damage, or None if the checkpoint is good.

    A file of another program or of another schema version is refused.
    """
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
            f"{document} has schema version {body.get('version')}, and this Equipoise reads version {VERSION}"
            ": use the release that wrote it, or a newer one"
        )
    if body.get("sha256") != _digest({key: value for key, value in body.items() if key != "sha256"}):
        return f"{document} does not match its own SHA-256"
    data, entry = _tensor_file(document), body["tensors"]
    if not data.is_file():
        return f"{data} is missing"
    if (size := data.stat().st_size) != entry["bytes"]:
        return f"{data} has {size} bytes instead of the {entry['bytes']} that were written"
    if _sha256(data) != entry["sha256"]:
        return f"{data} does not match its SHA-256"
    return None


def _digest(body: dict[str, Any]) -> str:
    """The SHA-256 of the JSON content, so that a changed digit in `meta` is noticed."""
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _structure(part: Tree) -> dict[str, Any]:
    """Return the tree with every tensor replaced by its dtype and shape as text.

    The tensor file is flat; this keeps the nesting, the order of keys, and empty dicts.
    """
    for key in part:
        if "/" in key:
            raise ValueError(f"the tree has the key {key!r}: expected no '/', which joins nested keys in the file")
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
    """Return the tensors on the CPU, each with a storage of its own and of just its size, as safetensors requires."""
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

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.core.errors import CheckpointError
from equipoise.runs import checkpoint

TREES = {
    "params": {"layer": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(3)}},
    "slots": {"scaffold": {"c": torch.ones(2)}, "fedprox": {}},
    "memory": {},
}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_rounds(folder: Path, *rounds: int) -> list[Path]:
    return [checkpoint.save(folder, {"params": {"w": torch.full((4,), r)}}, {"round": r}) for r in rounds]


def loaded_round(folder: Path) -> int:
    trees, meta = checkpoint.load(folder)
    assert trees["params"]["w"].tolist() == [meta["round"]] * 4
    return int(meta["round"])


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def test_round_trip_keeps_empty_dicts_order_and_meta(tmp_path: Path) -> None:
    meta = {"round": 3, "best": float("-inf"), "loss": float("nan"), "names": ["a", None], "share": 0.1 + 0.2}
    checkpoint.save(tmp_path / "deep" / "er", TREES, meta)
    trees, found = checkpoint.load(tmp_path / "deep" / "er")
    assert equal(TREES, trees)
    assert found.keys() == meta.keys()
    assert found["share"] == meta["share"]
    assert found["best"] == meta["best"]
    assert found["loss"] != found["loss"]


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor([2**62, -1]),
        torch.tensor([1 / 3], dtype=torch.float64),
        torch.tensor([1 / 3, 2.0], dtype=torch.bfloat16),
        torch.tensor(True),
        torch.arange(6).reshape(2, 3).T,
        torch.ones(1, 3).expand(5, 3),
        torch.arange(10)[3:5],
        torch.ones(2, requires_grad=True),
    ],
    ids=lambda leaf: f"{leaf.dtype}{list(leaf.shape)}",
)
def test_every_kind_of_tensor_survives(tmp_path: Path, leaf: Tensor) -> None:
    checkpoint.save(tmp_path, {"a": {"x": leaf, "again": leaf, "empty": torch.zeros(0)}}, {})
    trees, _ = checkpoint.load(tmp_path)
    assert equal(leaf.detach(), trees["a"]["x"])
    assert equal(leaf.detach(), trees["a"]["again"])


def test_views_of_one_storage_are_saved_separately_and_without_the_rest_of_the_storage(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    document = checkpoint.save(tmp_path, {"a": {"head": base[:2], "tail": base[2:4]}}, {})
    trees, _ = checkpoint.load(tmp_path)
    assert trees["a"]["head"].tolist() == [0, 1]
    assert trees["a"]["tail"].tolist() == [2, 3]
    assert document.with_suffix(".safetensors").stat().st_size < 1000


def test_loaded_tensors_are_aligned_and_outlive_the_file(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": {str(i): torch.ones(i) for i in range(1, 8)}}, {})
    trees, _ = checkpoint.load(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    assert all(leaf.data_ptr() % 64 == 0 and leaf.sum() == len(leaf) for leaf in trees["a"].values())


def test_keys_with_a_slash_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a/b"):
        checkpoint.save(tmp_path, {"t": {"a/b": torch.ones(1)}}, {})
    assert files(tmp_path) == []


def test_the_last_two_are_kept_and_leftovers_are_removed(tmp_path: Path) -> None:
    save_rounds(tmp_path, 1, 2)
    (tmp_path / "checkpoint-00000009.json.partial").write_text("interrupted")
    (tmp_path / "tensors.partial").mkdir()
    (tmp_path / "tensors.partial" / "of any name").write_text("interrupted")
    (tmp_path / "checkpoint-00000009.safetensors").write_text("its JSON never came")
    save_rounds(tmp_path, 3)
    assert files(tmp_path) == [f"checkpoint-0000000{n}.{e}" for n in (2, 3) for e in ("json", "safetensors")]


def test_files_have_the_permissions_of_their_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    document = checkpoint.save(tmp_path, TREES, {})
    assert document.with_suffix(".safetensors").stat().st_mode & 0o777 == 0o640


def truncate(document: Path) -> None:
    data = document.with_suffix(".safetensors")
    data.write_bytes(data.read_bytes()[:-1])


def flip(document: Path) -> None:
    data = document.with_suffix(".safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)


def lose(document: Path) -> None:
    document.with_suffix(".safetensors").unlink()


def tear(document: Path) -> None:
    document.write_bytes(document.read_bytes()[:40])


def change_the_round(document: Path) -> None:
    document.write_text(document.read_text().replace('"round": 2', '"round": 3'))


DAMAGE = {
    truncate: r"bytes instead of the \d+ that were written",
    flip: "does not match its SHA-256",
    lose: "is missing",
    tear: "cannot be read",
    change_the_round: "does not match its own SHA-256",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_if_the_newest_is_damaged_the_one_before_is_loaded_with_a_notice(tmp_path: Path, damage: Any) -> None:
    _, newest = save_rounds(tmp_path, 1, 2)
    damage(newest)
    assert loaded_round(tmp_path) == 1
    notice = checkpoint.load(tmp_path)[1]["recovered_from"]
    assert newest.stem in notice
    assert notice.endswith("checkpoint-00000001.json is used instead")


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_if_all_are_damaged_the_error_names_the_damage(tmp_path: Path, damage: Any) -> None:
    (only,) = save_rounds(tmp_path, 2)
    damage(only)
    with pytest.raises(CheckpointError, match=DAMAGE[damage]) as caught:
        checkpoint.load(tmp_path)
    assert str(only.with_suffix("")) in str(caught.value)


def test_a_damaged_one_does_not_count_among_the_two_kept(tmp_path: Path) -> None:
    _, second = save_rounds(tmp_path, 1, 2)
    flip(second)
    save_rounds(tmp_path, 3)
    assert loaded_round(tmp_path) == 3
    flip(tmp_path / "checkpoint-00000003.json")
    assert loaded_round(tmp_path) == 1


@pytest.mark.parametrize("content", ['{"round": 4}', "[1]", '{"format": "other", "version": 1}'])
def test_a_foreign_file_is_refused(tmp_path: Path, content: str) -> None:
    save_rounds(tmp_path, 1)
    (tmp_path / "checkpoint-00000002.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"checkpoint-00000002.json is not an Equipoise checkpoint"):
        checkpoint.load(tmp_path)


def test_a_newer_schema_is_refused_even_if_there_is_an_older_checkpoint(tmp_path: Path) -> None:
    save_rounds(tmp_path, 1)
    body = json.dumps({"format": checkpoint.FORMAT, "version": checkpoint.VERSION + 1})
    (tmp_path / "checkpoint-00000002.json").write_text(body)
    with pytest.raises(CheckpointError, match="schema version 2, and this Equipoise reads version 1"):
        checkpoint.load(tmp_path)


def test_nothing_to_load(tmp_path: Path) -> None:
    assert not checkpoint.exists(tmp_path)
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            checkpoint.load(folder)
    save_rounds(tmp_path, 1)
    assert checkpoint.exists(tmp_path)


@pytest.mark.parametrize("call", range(1, 5))
def test_a_full_disk_leaves_the_last_good_checkpoint_and_no_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    save_rounds(tmp_path, 1, 2)
    before = files(tmp_path)
    fsync, calls = os.fsync, iter(range(1, 100))

    def full(descriptor: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*00000003.json: No space left on device"):
        save_rounds(tmp_path, 3)
    monkeypatch.undo()
    # The fourth sync is that of the folder, the last step of saving: by then the third checkpoint is complete.
    assert loaded_round(tmp_path) == (3 if call == 4 else 2)
    assert [name for name in files(tmp_path) if "00000003" not in name] == before
    assert call == 4 or files(tmp_path) == before


def test_a_file_size_limit_that_is_met_while_writing_tensors(tmp_path: Path) -> None:
    program = """
import resource, sys, torch
from pathlib import Path
from equipoise.runs import checkpoint
from equipoise.core.errors import CheckpointError
folder = Path(sys.argv[1])
checkpoint.save(folder, {"a": {"w": torch.ones(4)}}, {"round": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    checkpoint.save(folder, {"a": {"w": torch.ones(4000)}}, {"round": 2})
except CheckpointError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert "File too large" in run.stdout
    assert checkpoint.load(tmp_path)[1] == {"round": 1}
    assert files(tmp_path) == ["checkpoint-00000001.json", "checkpoint-00000001.safetensors"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        checkpoint.save(tmp_path / "file" / "checkpoints", TREES, {})


class Killed(BaseException):
    """Simulates kill -9. It is a BaseException, so that no handler of the code under test catches it."""


@pytest.mark.parametrize("step", range(14))
def test_a_crash_before_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    save_rounds(tmp_path, 1, 2)
    steps = iter(range(100))

    def fragile(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == step:
                raise Killed
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(checkpoint, "save_file", fragile(checkpoint.save_file))
    monkeypatch.setattr(os, "fsync", fragile(os.fsync))
    for verb in ("chmod", "mkdir", "replace", "rmdir", "unlink", "write_bytes"):
        monkeypatch.setattr(Path, verb, fragile(getattr(Path, verb)))
    with pytest.raises(Killed):
        save_rounds(tmp_path, 3)
    monkeypatch.undo()
    assert loaded_round(tmp_path) in (2, 3)
    assert "recovered_from" not in checkpoint.load(tmp_path)[1]
    save_rounds(tmp_path, 4)
    assert loaded_round(tmp_path) == 4
    assert len(files(tmp_path)) == 4


def test_kill_9_while_saving_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    program = """
import sys, torch
from pathlib import Path
from equipoise.runs import checkpoint
folder = Path(sys.argv[1])
first = checkpoint.load(folder)[1]["round"] if checkpoint.exists(folder) else 0
for r in range(first + 1, 10**6):
    checkpoint.save(folder, {"params": {"w": torch.full((4,), r), "big": torch.zeros(200_000)}}, {"round": r})
    print(r, flush=True)
"""
    last = 0
    for pause in (0.003, 0.023):
        process = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        reported = max(int(line) for line in lines if line.endswith("\n"))
        process.wait()
        process.stdout.close()
        assert loaded_round(tmp_path) in (reported, reported + 1)
        assert reported > last
        last = reported

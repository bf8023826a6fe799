from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.core.errors import CheckpointError
from equipoise.runs import checkpoint
from equipoise.runs.folder import FORMAT, RunFolder, read_config, read_metrics

CONFIG = {"method": "scaffold", "train": {"rounds": 3}}

HOLD_LOCK = """
import os, sys, time
from pathlib import Path
from equipoise.runs.folder import RunFolder
run = RunFolder.open(Path(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "first"


def test_config_survives_and_can_be_read_while_the_run_goes_on(path: Path) -> None:
    with RunFolder.create(path, CONFIG):
        assert read_config(path) == CONFIG
    with RunFolder.open(path) as run:
        assert run.config == CONFIG


def test_creating_where_a_run_is_names_both_remedies(path: Path) -> None:
    RunFolder.create(path, CONFIG).close()
    with pytest.raises(CheckpointError) as caught:
        RunFolder.create(path, CONFIG)
    assert str(caught.value) == (
        f"{path} already holds a run: resume it with `equipoise resume {path}` or choose another --out"
    )
    RunFolder.open(path).close()  # the refused call released the lock


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_creating_among_the_files_of_another_run_is_refused(path: Path, name: str) -> None:
    (path / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"{name} but no config.json"):
        RunFolder.create(path, CONFIG)


def test_a_folder_with_other_files_may_be_used(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "notes.txt").write_text("mine")
    (path / "config.json.partial").write_text("killed while it was created")
    with RunFolder.create(path, CONFIG):
        assert (path / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot make the run folder .*file/run"):
        RunFolder.create(tmp_path / "file" / "run", CONFIG)


def test_only_one_process_can_use_a_folder(path: Path) -> None:
    with RunFolder.create(path, CONFIG):
        for attempt in (lambda: RunFolder.create(path, CONFIG), lambda: RunFolder.open(path)):
            with pytest.raises(CheckpointError, match=f"first is in use by process {os.getpid()}:"):
                attempt()
    RunFolder.open(path).close()


def test_kill_9_frees_the_lock(path: Path) -> None:
    RunFolder.create(path, CONFIG).close()
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    pid = int(holder.stdout.readline())
    try:
        with pytest.raises(CheckpointError, match=f"in use by process {pid}:"):
            RunFolder.open(path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    RunFolder.open(path).close()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "is not a run folder: it has no config.json"),
        ("{", "config.json cannot be read"),
        ("[]", "config.json was not written by Equipoise"),
        ('{"method": "fedavg"}', "config.json was not written by Equipoise"),
        (json.dumps({"format": FORMAT, "version": 2, "config": {}}), "has schema version 2, and this"),
    ],
)
def test_opening_what_is_not_a_run(path: Path, content: str | None, sentence: str) -> None:
    path.mkdir(parents=True)
    if content is not None:
        (path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=sentence):
        RunFolder.open(path)
    assert not (path / "lock").exists()


def test_documents(path: Path) -> None:
    with RunFolder.create(path, CONFIG) as run:
        assert run.read("plan") is None
        run.write("plan", {"threads": 2})
        run.write("plan", {"threads": 1})
        assert run.read("plan") == {"threads": 1}
        (path / "plan.json").write_text("torn")
        with pytest.raises(CheckpointError, match=r"plan.json cannot be read"):
            run.read("plan")


def test_records_are_lines_of_plain_json(path: Path) -> None:
    with RunFolder.create(path, CONFIG) as run:
        assert run.records() == []
        run.append({"round": 1, "loss": float("nan"), "recall": np.array([0.5, np.inf]), "n": np.int64(3)})
        run.append({"round": 2, "loss": torch.tensor(0.25), "worst": (1, None), "note": "a\nb"})
        expected = [
            {"round": 1, "loss": None, "recall": [0.5, None], "n": 3},
            {"round": 2, "loss": 0.25, "worst": [1, None], "note": "a\nb"},
        ]
        assert run.records() == expected
        lines = (path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == expected


def test_rewind_drops_later_rounds_and_leaves_the_rest_as_written(path: Path) -> None:
    with RunFolder.create(path, CONFIG) as run:
        run.append({"started": "today"})
        for r in range(3):
            run.append({"round": r, "loss": 0.1 + r})
        before = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
        run.rewind(1)
        assert (path / "metrics.jsonl").read_text() == "".join(before[:3])
        run.append({"round": 2, "loss": 2.1})
        assert (path / "metrics.jsonl").read_text() == "".join(before)
        run.rewind(-1)
        assert run.records() == [{"started": "today"}]


@pytest.mark.parametrize("torn", ['{"round": 2, "lo', "12", "\0\0\0", "\xff"])
def test_an_incomplete_last_line_is_skipped_and_repaired(path: Path, torn: str) -> None:
    with RunFolder.create(path, CONFIG) as run:
        run.append({"round": 1})
        with (path / "metrics.jsonl").open("a", encoding="latin-1") as file:
            file.write(torn)
        assert read_metrics(path) == [{"round": 1}]
        run.rewind(5)
        run.append({"round": 2})
        assert run.records() == [{"round": 1}, {"round": 2}]


def test_a_complete_last_line_without_a_newline_is_kept(path: Path) -> None:
    with RunFolder.create(path, CONFIG) as run:
        (path / "metrics.jsonl").write_text('{"round":1}')
        run.rewind(1)
        assert (path / "metrics.jsonl").read_text() == '{"round":1}\n'


def test_damage_in_the_middle_is_an_error_that_names_the_line(path: Path) -> None:
    with RunFolder.create(path, CONFIG) as run:
        (path / "metrics.jsonl").write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
        with pytest.raises(CheckpointError, match=r"line 2 of .*metrics.jsonl is not a JSON record"):
            run.rewind(3)


def test_a_disk_that_fills_inside_a_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Filling:
        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 5

        def __enter__(self) -> Filling:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def tell(self) -> int:
            return int(self.file.tell())

        def truncate(self, size: int) -> None:
            self.file.truncate(size)

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written, self.room = self.file.write(data[: self.room]), 0
            return int(written)

    with RunFolder.create(path, CONFIG) as run:
        run.append({"round": 1})
        opened = Path.open
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", lambda *args, **kwargs: Filling(opened(*args, **kwargs)))
            with pytest.raises(CheckpointError, match=r"cannot write .*metrics.jsonl: No space left on device"):
                run.append({"round": 2})
        assert (path / "metrics.jsonl").read_text() == '{"round":1}\n'


def test_checkpoints(path: Path) -> None:
    with RunFolder.create(path, CONFIG) as run:
        assert run.load() is None
        run.append({"round": 1})
        file = run.save({"params": {"w": torch.ones(2)}}, {"round": 1})
        assert file.parent == path / "checkpoints"
        loaded = run.load()
        assert loaded is not None
        assert loaded[1] == {"round": 1}
        assert loaded[0]["params"]["w"].tolist() == [1, 1]


def test_metrics_are_synced_before_the_checkpoint_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    with RunFolder.create(path, CONFIG) as run:
        run.append({"round": 1})
        synced.clear()
        run.save({"params": {"w": torch.ones(2)}}, {"round": 1})
    assert synced[0] == (path / "metrics.jsonl").stat().st_ino
    assert checkpoint.load(path / "checkpoints")[1] == {"round": 1}

"""A method in a file outside the package, through every command that takes one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMOOTH = '''
"""Label smoothing at the clients, and a count of their visits."""
from dataclasses import dataclass

import torch

import equipoise as eq
from equipoise import tree


@dataclass(frozen=True)
class Smooth(eq.Method):
    eps: float = 0.1

    name = "smooth"
    about = "label smoothing"
    words = {"visits": "how often the client was visited", "last": "the last update of the model"}

    def init(self, turn):
        return {"last": tree.zeros(turn.params)}

    def remember(self, params, classes):
        return {"visits": next(tree.leaves(params)).new_zeros(())}

    def losses(self, losses, logits, y, env):
        return (1 - self.eps) * losses - self.eps * logits.log_softmax(-1).mean(-1)

    def finish(self, delta, env, data):
        return {"visits": env.memory["visits"] + 1}, {"visits": env.memory["visits"] + 1}

    def update(self, update, sums, slot):
        return tree.axpy(0.5, slot["last"], update), {"last": update}
'''
CONFIG = """
method = "mylab.smooth:Smooth(eps=0.2) + climb(every=1)"

[data]
source = "digits"
partition = { kind = "dirichlet", clients = 6, alpha = 0.5 }

[model]
name = "logistic"

[local]
batch = 32

[train]
rounds = 40
cohort = 3
threads = 1
checkpoint_seconds = 0.0
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab" / "smooth.py").write_text(SMOOTH)
    (tmp_path / "a.toml").write_text(CONFIG)
    return tmp_path


def equipoise(lab: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "equipoise.cli", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=lab, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def test_it_is_checked(lab: Path) -> None:
    found = json.loads(equipoise(lab, "check", "mylab.smooth:Smooth + climb", "--json"))
    assert found["kept"], found
    assert all(finding["kept"] for finding in found["findings"])
    (lab / "mylab" / "smooth.py").write_text(SMOOTH.replace("losses - self.eps", "losses.mean() - self.eps"))
    said = subprocess.run(
        [sys.executable, "-m", "equipoise.cli", "check", "mylab.smooth:Smooth"],
        cwd=lab,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 1
    assert "BROKEN padding in batches is masked" in said.stdout
    assert "where `env.mask` is false" in said.stdout


def test_it_is_described_compared_and_swept(lab: Path) -> None:
    assert "how often the client was visited" in equipoise(lab, "describe", "mylab.smooth:Smooth")
    short = ["--set", "train.rounds=2", "--json"]
    methods = "fedavg, mylab.smooth:Smooth(eps=0.2) + climb(every=1)"
    rows = json.loads(equipoise(lab, "compare", "a.toml", "--methods", methods, "--seeds", "2", *short))["rows"]
    assert [(row["name"], row["seeds"]) for row in rows] == [(name, 2) for name in methods.split(", ")]
    again = json.loads(equipoise(lab, "compare", "a.toml", "--methods", methods, "--seeds", "2", *short))["rows"]
    assert again == rows
    grid = "method=mylab.smooth:Smooth(eps=0.1),mylab.smooth:Smooth(eps=0.3)"
    assert len(json.loads(equipoise(lab, "sweep", "a.toml", "--grid", grid, *short))["rows"]) == 2


def test_a_run_that_is_killed_resumes_to_the_same_bits(lab: Path) -> None:
    equipoise(lab, "run", "a.toml", "--out", "whole")
    command = [sys.executable, "-m", "equipoise.cli", "run", "a.toml", "--out", "cut"]
    child = subprocess.Popen(command, cwd=lab, env=os.environ | {"OMP_NUM_THREADS": "1"})
    until = time.monotonic() + 120
    while not list((lab / "cut").glob("checkpoints/checkpoint-0000000[3-9].json")):
        assert child.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (lab / "cut" / "result.json").exists()
    equipoise(lab, "resume", "cut")
    for name in ("model.safetensors", "best.safetensors"):
        assert (lab / "cut" / name).read_bytes() == (lab / "whole" / name).read_bytes()


def test_a_mistake_is_one_sentence(lab: Path) -> None:
    said = equipoise(lab, "run", "a.toml", "--set", "method=mylab.smoth:Smooth", code=2)
    assert "method 'mylab.smoth:Smooth' names the module 'mylab.smoth', which is neither in" in said
    (lab / "mylab" / "smooth.py").write_text(SMOOTH.replace("def losses", "def loses"))
    said = equipoise(lab, "run", "a.toml", code=2)
    assert "has a function loses, which is no tap: did you mean losses" in said

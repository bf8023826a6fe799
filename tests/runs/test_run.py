"""Runs in folders. A run that is killed at any moment and resumed ends in the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from equipoise.core.errors import CheckpointError, ConfigError, TrainingError
from equipoise.fast import accelerated as stacked
from equipoise.runs import execution
from equipoise.runs import run as runs
from equipoise.runs.config import Config


def config(**changes: object) -> Config:
    raw: dict[str, dict[str, object] | object] = {
        "method": "scaffold + fedprox(mu=0.1) + fedavgm(momentum=0.5)",
        "data": {
            "source": "digits",
            "imbalance": {"kind": "step", "rho": 5, "minority": [0, 2]},
            "partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.5},
        },
        "model": {"name": "mlp", "hidden": [16]},
        "local": {"lr": 0.1, "batch": 32, "epochs": 1},
        "train": {"rounds": 6, "cohort": 4, "threads": 1, "device": "cpu", "checkpoint_seconds": 0.0},
    }
    for path, value in changes.items():
        table, _, key = path.partition("__")
        if key:
            raw[table] = {**raw[table], key: value}  # type: ignore[dict-item]
        else:
            raw[table] = value
    return Config.from_dict(raw)


class Stop(Exception):
    pass


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: Path, b: Path) -> None:
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_data_at_real_sites_cannot_be_simulated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.source = 'sites': the data stay with real sites, which join"):
        runs.run(config(data={"source": "sites"}), tmp_path / "run")


def test_a_run_folder_holds_everything(tmp_path: Path) -> None:
    result = runs.run(config(train__target=0.3), tmp_path / "run")
    folder = tmp_path / "run"
    for name in ("config.json", "federation.json", "plan.json", "metrics.jsonl", "result.json", "model.safetensors"):
        assert (folder / name).exists(), name
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["accuracy"] == result["last"]["accuracy"]
    assert lines[-1]["auroc"] is not None
    assert result["reached"] == next(line["round"] for line in lines if line["accuracy"] >= 0.3)
    federation = json.loads((folder / "federation.json").read_text())
    assert federation["minority"] == [0, 2]
    assert min(federation["train_counts"]) * 4 < max(federation["train_counts"])
    assert result["across_clients"]["client_accuracy"]["count"] == 8
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["torch"] == torch.__version__
    assert plan["threads"] == 1


CHILD = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
import equipoise.fast
from equipoise.runs import federate, run as runs
from equipoise.runs.config import Config
folder, kills = Path(sys.argv[1]), int(sys.argv[2])
config = Config.from_dict(json.loads(sys.argv[3]))
federate.federate(config)  # loads the modules that are imported late, so that the children start at once
draw = random.Random(7)
done = 0
go = lambda: runs.resume(folder) if (folder / "config.json").exists() else runs.run(config, folder)
while done < kills:
    child = os.fork()
    if child == 0:
        try:
            go()
        finally:
            os._exit(0)
    time.sleep(draw.uniform(0, float(sys.argv[4])))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    done += 1
    if (folder / "result.json").exists():
        break
print(done, (folder / "result.json").exists())
go()
"""


def killed(folder: Path, settings: Config, kills: int, longest: float) -> tuple[int, bool]:
    """Kill a run with -9 at random moments, resume it each time, and finish it.

    Return the number of kills, and whether the run had finished before the last one.
    """
    command = [sys.executable, "-c", CHILD, str(folder), str(kills), json.dumps(settings.to_dict()), str(longest)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(printed[0]), printed[1] == "True"


def test_killed_twenty_times_and_resumed_ends_in_the_same_bits(tmp_path: Path) -> None:
    settings = config(train__rounds=400)
    seconds = runs.run(settings, tmp_path / "whole")["seconds"]
    kills, early = killed(tmp_path / "killed", settings, 20, longest=seconds / 12)
    assert kills == 20, "the run was over before the twentieth kill: give it more rounds"
    assert not early
    same(tmp_path / "whole", tmp_path / "killed")
    whole, again = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "killed")
    )
    for a, b in zip(whole, again, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}


def test_resume_continues_from_the_checkpoint_only(tmp_path: Path) -> None:
    runs.run(config(train__rounds=6), tmp_path / "whole")
    seen: list[int] = []

    def stop(step: object) -> None:
        if step.round == 3:  # type: ignore[attr-defined]
            raise Stop

    with pytest.raises(Stop):
        runs.run(config(train__rounds=6), tmp_path / "cut", runs.Watch(step=stop))
    runs.resume(tmp_path / "cut", runs.Watch(step=lambda step: seen.append(step.round)))
    assert seen == [4, 5, 6]
    same(tmp_path / "whole", tmp_path / "cut")


def test_resuming_a_finished_run_returns_its_result(tmp_path: Path) -> None:
    first = runs.run(config(train__rounds=2), tmp_path / "run")
    notices: list[str] = []
    assert runs.resume(tmp_path / "run", runs.Watch(notify=notices.append)) == json.loads(json.dumps(first))
    assert "finished already" in notices[0]


def test_resuming_with_another_torch_is_notified(tmp_path: Path) -> None:
    runs.run(config(train__rounds=2), tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    (tmp_path / "run" / "plan.json").write_text(json.dumps(plan | {"torch": "1.0"}))
    notices: list[str] = []
    runs.resume(tmp_path / "run", runs.Watch(notify=notices.append))
    assert "torch 1.0 is now" in notices[0]
    assert "up to rounding, not bit by bit" in notices[0]


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    runs.run(config(train__rounds=1), tmp_path / "run")
    with pytest.raises(CheckpointError, match="already holds a run"):
        runs.run(config(train__rounds=1), tmp_path / "run")


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    runs.run(config(train__rounds=2), tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    for document in (tmp_path / "run" / "checkpoints").glob("*.json"):
        document.write_text('{"format": "something else"}')
    with pytest.raises(CheckpointError):
        runs.resume(tmp_path / "run")


def test_the_error_for_not_a_number_names_round_and_client(tmp_path: Path) -> None:
    wild = config(method="fedavg", local__lr=1e30, local__clip=None, train__rounds=5)
    with pytest.raises(TrainingError, match=r"round \d+: the training of client \d+ turned into not-a-number"):
        runs.run(wild, tmp_path / "run")


@pytest.mark.parametrize("method", ["centralised", "local"])
def test_baselines_run_like_methods(method: str, tmp_path: Path) -> None:
    result = runs.run(config(method=method, train__rounds=2), tmp_path / method)
    assert len(result["last"]["recall"]) == 10
    if method == "local":
        # Each of the 8 clients is tested on the whole test set.
        assert sum(result["last"]["counts"]) == 8 * 359


def test_the_baseline_local_with_one_client_equals_fedavg_with_one_client(tmp_path: Path) -> None:
    one = config(method="local", data__partition={"kind": "iid", "clients": 1}, train__rounds=3, train__cohort=None)
    other = config(
        method="fedavg", data__partition={"kind": "iid", "clients": 1}, train__rounds=3, train__cohort=None
    )
    alone, federated = runs.run(one, tmp_path / "one"), runs.run(other, tmp_path / "other")
    assert alone["last"]["confusion"] == federated["last"]["confusion"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "scafold"}, "did you mean 'scaffold'"),
        ({"train__cohort": 9}, "train.cohort = 9"),
        ({"data__minority": ["eleven"]}, "there is no class 'eleven'"),
        ({"train__device": "cuda"}, "no CUDA device"),
        ({"method": "scaffold", "local__optimiser": "adam"}, "expected local.optimiser = 'sgd'"),
        ({"method": "fednova", "local__optimiser": "adam"}, "fednova computes gradients from the clients' deltas"),
        ({"model__name": "mpl"}, "did you mean 'mlp'"),
    ],
)
def test_mistakes_are_found_before_the_first_round(changes: dict[str, object], sentence: str, tmp_path: Path) -> None:
    if changes.get("train__device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigError, match=sentence):
        runs.run(config(**changes), tmp_path / "run")


def test_absent_classes_and_empty_clients_are_notified(tmp_path: Path) -> None:
    notices: list[str] = []
    odd = config(
        method="fedavg",
        data__imbalance={"kind": "counts", "counts": [0, 0, 5, 5, 0, 0, 0, 0, 0, 0]},
        data__partition={"kind": "iid", "clients": 12},
        train__rounds=1,
    )
    runs.run(odd, tmp_path / "run", runs.Watch(notify=notices.append))
    assert notices == [
        "no client has a sample of class 0, 1, 4, 5, 6, 7, 8, 9",
        "2 of 12 clients got no samples from the partition and are skipped",
    ]


def test_the_plan_names_the_compiled_rounds_before_they_run_and_a_resumed_run_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[tuple[int, int | None]] = []  # at each compilation: its number, and `compile_from` in plan.json
    real = stacked.compiled

    def traced(step: object, task: object, backend: str, *others: object) -> object:
        plan = json.loads((tmp_path / where[0] / "plan.json").read_text())
        plans.append((len(plans), plan["compile_from"]))
        return real(step, task, "eager", *others)  # type: ignore[arg-type]

    monkeypatch.setattr(stacked, "compiled", traced)
    monkeypatch.setattr(execution, "_compile_from", lambda *_: 3)
    where = ["whole"]
    runs.run(config(train__cohort=None), tmp_path / "whole")
    assert [plan for _, plan in plans] == [3, 3, 3]  # the last three of six rounds

    def stop(step: object) -> None:
        if step.round == 4:  # type: ignore[attr-defined]
            raise Stop

    where[0] = "cut"
    with pytest.raises(Stop):
        runs.run(config(train__cohort=None), tmp_path / "cut", runs.Watch(step=stop))
    plans.clear()
    runs.resume(tmp_path / "cut")
    assert [plan for _, plan in plans] == [3, 3]
    same(tmp_path / "whole", tmp_path / "cut")

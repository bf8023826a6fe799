"""Processes that are killed: a site during a round, and the SuperLink and the server during a run."""

from __future__ import annotations

import os
import re
import signal

from .stage import SITES, Stage, until


def test_a_site_killed_in_a_round_is_left_out_until_it_joins_again(stage: Stage) -> None:
    stage.certs()
    stage.tables()
    stage.set(("rounds = 3", "rounds = 8"), ("deadline = 60", "deadline = 25"))
    serve = stage.serve()
    joined = {name: stage.join(name) for name in SITES}
    until(lambda: len(stage.records()) >= 1)
    log = stage.folder / "sites/site_b/supernode.log"
    trained = log.read_text().count("Receiving: train")
    until(lambda: log.read_text().count("Receiving: train") > trained)
    joined["site_b"].process.kill()
    until(lambda: stage.processes("site_b") == [], 15)  # its SuperNode and all other child processes have ended too
    until(lambda: re.search(r"round \d+: site_b[ ()\d]* is left out", serve.text()))
    without = len(stage.records())
    until(lambda: any(record["clients"] == 2 for record in stage.records()))
    joined["site_b"] = stage.join("site_b")
    assert serve.ends(400) == 0, serve.text()
    assert [running.ends() for running in joined.values()] == [0, 0, 0]
    clients = [record["clients"] for record in stage.records()]
    assert clients[0] == 3
    assert 2 in clients
    assert 3 in clients[without + 1 :], clients
    assert stage.records()[clients.index(2)]["dropped"] >= 1


def test_after_the_superlink_was_killed_the_resumed_run_gives_the_same_model(stage: Stage) -> None:
    stage.certs()
    stage.tables()
    stage.set(("fedavg", "scaffold + fedshift"))
    uncut = stage.serve(out="uncut")
    joined = [stage.join(name) for name in SITES]
    assert uncut.ends() == 0, uncut.text()
    assert [running.ends() for running in joined] == [0, 0, 0]

    cut = stage.serve(out="cut")
    joined = [stage.join(name) for name in SITES]
    until(lambda: len(stage.records("cut")) >= 1)
    for process in stage.processes("flower-superlink"):
        os.kill(process, signal.SIGKILL)
    assert cut.ends(60) == 2
    assert "the SuperLink ended (killed by signal 9); `equipoise resume cut` goes on" in cut.text()
    resumed = stage.start("resume", "cut")
    assert resumed.ends() == 0, resumed.text()
    assert [running.ends() for running in joined] == [0, 0, 0]
    assert [record["round"] for record in stage.records("cut")] == [1, 2, 3]
    models = [(stage.folder / run / "model.safetensors").read_bytes() for run in ("uncut", "cut")]
    assert models[0] == models[1]


def test_a_server_killed_with_9_leaves_nothing_and_can_be_resumed(stage: Stage) -> None:
    stage.certs()
    stage.tables()
    serve = stage.serve()
    joined = [stage.join(name) for name in SITES]
    until(lambda: len(stage.records()) >= 1)
    serve.process.kill()
    until(lambda: not stage.processes("flower-superlink") and not stage.processes("transport.gate"), 15)
    resumed = stage.start("resume", "run", "--json")
    assert resumed.ends() == 0, resumed.text()
    assert [running.ends() for running in joined] == [0, 0, 0]
    assert [record["round"] for record in stage.records()] == [1, 2, 3]


def test_a_try_out_that_is_killed_leaves_nothing(stage: Stage) -> None:
    """Kill a try-out while its sites run; `clean_stage` then checks that nothing is left."""
    stage.set(('source = "sites"', 'source = "digits"'), ('options = { label = "digit" }\n', ""))
    running = stage.start("local", "run.toml", "--sites", 3, "--out", "run")
    running.says("sites join at")
    until(lambda: len(stage.processes("flower-supernode")) == 3)
    running.process.kill()

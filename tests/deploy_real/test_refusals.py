"""Sites that the gate refuses, and sites that join and are then left out. The run goes on with the other sites."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from .stage import SITES, Stage


def test_strangers_are_refused_and_named_and_the_run_goes_on(stage: Stage) -> None:
    stage.certs()
    stage.certs(["stranger"], out="other")
    stage.tables()
    shutil.copy(stage.folder / "site_a.csv", stage.folder / "stranger.csv")
    # The stranger has the certificate of the right authority, but a key that the server does not know.
    shutil.copy(stage.folder / "certs/site_a/ca.crt", stage.folder / "other/stranger/ca.crt")
    serve = stage.serve()
    joined = [stage.join(name) for name in SITES]
    serve.says("sites join at")
    unknown = stage.join("stranger", "--certs", "other/stranger")
    thief = stage.join("site_b", "--certs", "other/stranger", "--out", "sites/thief")
    plain = stage.join("site_c", "--insecure", "--out", "sites/plain")
    assert unknown.ends() == thief.ends() == plain.ends() == 2
    assert "the server does not know the key of this site" in unknown.text()
    assert "the server does not know the key of this site" in thief.text()
    assert "the server uses TLS; expected --certs" in plain.text()
    words = ["ssh-keygen", "-l", "-f", str(stage.folder / "other/stranger/key.pub")]
    fingerprint = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[1]
    serve.says(f"with key {fingerprint}")
    serve.says("refused a connection: it does not use TLS")
    assert serve.ends() == 0, serve.text()
    assert [running.ends() for running in joined] == [0, 0, 0]
    assert [record["clients"] for record in stage.records()] == [3, 3, 3]
    assert "3 of 3 sites have the final model" in serve.text()
    models = {(stage.folder / "sites" / name / "model.safetensors").read_bytes() for name in SITES}
    assert models == {(stage.folder / "run/model.safetensors").read_bytes()}


def test_a_site_that_sends_wrong_replies_is_left_out_and_named(stage: Stage) -> None:
    stage.certs()
    stage.tables()
    stage.set(("[deploy]", "[deploy]\nmessage_mib = 1"))
    serve = stage.serve()
    honest = [stage.join(name) for name in ("site_a", "site_b")]
    rogue = Path(__file__).parent / "rogue.py"
    bad = stage.run([sys.executable, str(rogue), f"localhost:{stage.port}", "site_c"])
    assert serve.ends() == 0, serve.text()
    assert [running.ends() for running in honest] == [0, 0]
    assert bad.ends() == 0, bad.text()
    assert [record["clients"] for record in stage.records()] == [2, 2, 2]
    for said in ("round 1: site_c", "round 2: site_c", "round 3: site_c"):
        assert said in serve.text()
    assert "expected float64 [10, 64]" in serve.text()
    assert "not finite" in serve.text()
    assert "at most 1,048,576" in serve.text()

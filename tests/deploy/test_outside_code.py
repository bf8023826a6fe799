"""Methods and models outside Equipoise at a site: allowed ones work as in a simulation, others are never imported."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from equipoise.core.errors import NotAllowed, TrainingError
from equipoise.core.local import Local
from equipoise.deploy.agreement import Agreement
from equipoise.deploy.packets import check_model, read_chain, read_question, write_local, write_question
from equipoise.deploy.site import Site
from equipoise.deploy.transport.wire import Packet, WireError
from equipoise.methods import registry
from equipoise.methods.registry import parse
from equipoise.runs.config import Config
from equipoise.testing.contract import compare as close
from tests.deploy import outside
from tests.deploy.simulation import simulated
from tests.deploy.sites import agreed, sites
from tests.deploy.test_parity import LINEAR, compare
from tests.deploy.test_server import Clinics, config, write_tables
from tests.federations import federation

SMOOTH, TEMPER, TWICE = "mylab.smooth:Smooth", "mylab.confidence:Temper", "mylab.choice:Twice"
SMOOTH_CLIMB = f"{SMOOTH}(amount=0.2) + climb(eta=2.0, epsilon=0.01, every=1)"


@pytest.fixture(autouse=True)
def mylab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    outside.write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with outside.forgotten():
        yield


@pytest.mark.parametrize(
    ("method", "allowed"),
    [
        (SMOOTH_CLIMB, SMOOTH),
        (f"scaffold + {TEMPER}(levels=(0.3, 0.5, 0.9))", TEMPER),
        (f"{TWICE} + fedprox(mu=0.1)", TWICE),
    ],
    ids=["losses", "question", "resample"],
)
def test_an_allowed_method_equals_the_stacked_engine(method: str, allowed: str, tmp_path: Path) -> None:
    compare(federation(), parse(method), LINEAR, tmp_path, 3, 1e-10, methods=(allowed,))


def test_a_whole_run_with_an_allowed_method_and_model_equals_a_simulation(tmp_path: Path) -> None:
    clinics = Clinics(tmp_path, write_tables(tmp_path), methods=(SMOOTH,), models=("mylab.net:small",))
    settings = config(method=SMOOTH_CLIMB).model_copy(update={"model": own_model()})
    clinics.run(settings, tmp_path / "run")
    agreement = Agreement.from_dict(json.loads((tmp_path / "run" / "agreement.json").read_text()))
    assert agreement.method == SMOOTH_CLIMB
    want = simulated(settings, agreement, list(clinics.sites.values()))
    close(load_file(tmp_path / "run" / "model.safetensors"), want, 1e-10)


def own_model() -> Any:
    return Config.from_dict({"data": {"source": "sites"}, "model": {"name": "mylab.net:small"}}).model


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (site, *_) = sites(federation(), tmp_path, LINEAR).values()
    return site


def request(kind: str, method: str = "fedavg", model: str = LINEAR, **header: Any) -> Packet:
    """A request as a server sends it, which need not have the code itself."""
    agreement = agreed(federation(), parse("fedavg"), model, method=method).to_dict()
    rest = {"version": [-1, 0], "base": [-2, 0], "needed": [], "stages": 0, **header}
    return Packet(kind, json.loads(json.dumps({"agreement": agreement, **rest})), {})


TRAIN = {"local": write_local(Local()), "round": 0, "wave": 0, "summed": True}


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        (request("moments", SMOOTH_CLIMB), f"--allow-method {SMOOTH}"),
        (request("ask", SMOOTH_CLIMB), f"--allow-method {SMOOTH}"),
        (request("deliver", SMOOTH_CLIMB), f"--allow-method {SMOOTH}"),
        (request("train", method=f"climb + {SMOOTH}", **TRAIN), f"--allow-method {SMOOTH}"),
        (request("moments", model="mylab.net:small"), "--allow-model mylab.net:small"),
    ],
    ids=["moments", "ask", "deliver", "train", "model"],
)
def test_a_site_refuses_an_agreement_with_code_that_it_does_not_allow(site: Site, asked: Packet, option: str) -> None:
    refuses(site, asked, option)


@pytest.mark.parametrize("kind", ["train", "resample"])
def test_a_site_refuses_such_code_in_the_header_of_a_request_too(site: Site, kind: str) -> None:
    asked = request(kind, stage=0, **TRAIN)
    asked.header["method"] = SMOOTH
    refuses(site, asked, f"--allow-method {SMOOTH}")


def refuses(site: Site, asked: Packet, option: str) -> None:
    said: list[str] = []
    site.say = said.append
    reply = site.answer(asked)
    assert reply.kind == "failure"
    assert reply.header["final"] is True
    assert option in reply.header["reason"]
    assert repr(option.split()[1]) in reply.header["reason"]
    assert said == [reply.header["reason"]]
    assert outside.imported() == []


def test_a_refused_name_cannot_control_the_terminal_of_the_site(site: Site) -> None:
    reason = site.answer(request("moments", model="mylab.net:\x1b[2Jsmall")).header["reason"]
    assert reason.endswith("--allow-model mylab.net:?[2Jsmall")
    assert reason.isprintable()


def test_permission_for_a_class_is_permission_for_its_module_only(tmp_path: Path) -> None:
    allow = ("mylab.smooth:Other", SMOOTH + "er")
    assert str(read_chain(SMOOTH_CLIMB, allow)) == SMOOTH_CLIMB
    with pytest.raises(NotAllowed, match=rf"'{TEMPER}'.*--allow-method {TEMPER}"):
        read_chain(f"{SMOOTH} + {TEMPER}", allow)
    check_model("mylab.net:small", ("mylab.net:small",))
    with pytest.raises(NotAllowed, match=r"'mylab.net:large'.*--allow-model mylab.net:large"):
        check_model("mylab.net:large", ("mylab.net:small",))


def test_a_name_that_another_package_registers_needs_permission_too(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("smooth", SMOOTH, registry.GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda: {"smooth": entry})
    with pytest.raises(NotAllowed, match=r"'smooth'.*--allow-method smooth"):
        read_chain("smooth + climb")
    assert outside.imported() == []
    assert str(read_chain("smooth + climb", ("smooth",))) == "smooth + climb"


def test_a_question_is_known_only_after_its_method_was_allowed(tmp_path: Path) -> None:
    # A module of its own: Python may keep the question of another test for a while after its module was removed.
    (tmp_path / "mylab" / "fresh.py").write_text(outside.CONFIDENCE)
    settings = {"kind": "mylab.fresh:Confident", "levels": [0.5]}
    with pytest.raises(WireError, match=r"the question 'mylab.fresh:Confident' is unknown here"):
        read_question(settings)
    assert outside.imported() == []
    read_chain("mylab.fresh:Temper", ("mylab.fresh:Temper",))
    question = read_question(settings)
    assert json.loads(json.dumps(write_question(question))) == settings
    assert hash(question) == hash(read_question(settings))


# -- the server ------------------------------------------------------------------------------------------------------
def test_the_server_stops_at_once_and_names_the_sites_and_the_option(tmp_path: Path) -> None:
    clinics = Clinics(tmp_path, write_tables(tmp_path))
    began = time.monotonic()
    sentence = (
        r"before the first round: clinic \(0\), hospital \(1\), surgery \(2\) refused to take part: method"
        rf" '{SMOOTH}' is code .* --allow-method {SMOOTH}$"
    )
    with pytest.raises(TrainingError, match=sentence):
        clinics.run(config(method=SMOOTH_CLIMB, wait=600.0, deadline=600.0), tmp_path / "run")
    assert time.monotonic() - began < 60
    assert not any("left out" in line for line in clinics.said)


def test_one_site_that_refuses_the_model_stops_the_run_before_the_first_round(tmp_path: Path) -> None:
    clinics = Clinics(tmp_path, write_tables(tmp_path), models=("mylab.net:small",))
    clinics.sites[11].models = ()
    settings = config(method="fedavg", wait=600.0).model_copy(update={"model": own_model()})
    with pytest.raises(TrainingError, match=r"round: hospital \(1\) refused .* --allow-model mylab.net:small$"):
        clinics.run(settings, tmp_path / "run")
    clinics.sites[11].models = ("mylab.net:small",)  # the operator has joined again with the option
    assert clinics.run(settings, tmp_path / "run")["last"]["clients"] == 3


def test_a_site_that_joins_again_without_the_option_is_left_out_of_the_round(tmp_path: Path) -> None:
    clinics = Clinics(tmp_path, write_tables(tmp_path), methods=(SMOOTH,))

    def forget(request: Packet, reply: Packet) -> Packet:
        if request.kind == "train" and request.header["round"] == 0:
            clinics.sites[10].methods = ()
        return reply

    clinics.meddle[12] = forget  # the last site to answer
    result = clinics.run(config(method=SMOOTH), tmp_path / "run")
    assert result["last"]["round"] == 3
    assert result["last"]["clients"] == 2
    assert any("clinic (0) is left out: method 'mylab" in line for line in clinics.said)


def test_other_failures_before_the_first_round_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.deploy.flower.RETRY", 0.1)
    clinics = Clinics(tmp_path, write_tables(tmp_path))
    failures = iter([{"reason": "the disk is full"}, {"reason": "the disk is full", "final": False}])

    def fail(request: Packet, reply: Packet) -> Packet:
        header = next(failures, None) if request.kind == "moments" else None
        return reply if header is None else Packet("failure", header, {})

    clinics.meddle[11] = fail
    assert clinics.run(config(method="fedavg", wait=60.0), tmp_path / "run")["last"]["clients"] == 3
    assert sum("the disk is full" in line for line in clinics.said) == 1

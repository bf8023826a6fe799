"""All commands of docs/deploy.md, run on this machine in the order of the page."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

from tests.test_docs import ROOT, WITH_SITES, blocks

from .stage import SITES, Stage

VERBS = ("certs", "serve", "join", "join", "join", "predict", "local", "local", "resume", "describe")


def test_every_command_of_the_page_works(stage: Stage) -> None:
    share_bank(stage.folder)
    pages = blocks(WITH_SITES)
    (config,) = (text for kind, text in pages if kind == "toml")
    assert "rounds = 20" in config
    (stage.folder / "run.toml").write_text(config.replace("rounds = 20", "rounds = 1"))
    (stage.folder / "examples").symlink_to(ROOT / "examples")
    write_smooth(stage.folder)
    lines = [line for kind, text in pages if kind == "sh" for line in text.splitlines() if line]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("equipoise ")]
    assert tuple(words[0] for words in commands) == VERBS
    assert set(lines) - {line for line in lines if line.startswith("equipoise ")} == {
        'pip install "equipoise[flower]"'
    }
    going = []
    for words in commands:
        here = [word.replace("fl.example.org", "localhost").replace("9092", str(stage.port)) for word in words]
        here = [word.replace("train.rounds=5", "train.rounds=1") for word in here]
        if words[0] not in ("serve", "join"):
            finished = [running.ends() for running in going]
            assert finished == [0] * len(going), "\n".join(running.text() for running in going)
            going = []
        running = stage.start(*here)
        if words[0] in ("serve", "join"):
            going.append(running)
        else:
            assert running.ends(400) == 0, running.text()
    with (stage.folder / "predictions.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len((stage.folder / "site_a.csv").read_text().splitlines()) - 1


def share_bank(folder: Path) -> None:
    """Divide the made-up payments of examples/bank.csv among the sites."""
    header, *rows = (ROOT / "examples" / "bank.csv").read_text().splitlines()
    for number, name in enumerate(SITES):
        (folder / f"{name}.csv").write_text("\n".join([header, *rows[number::3]]) + "\n")


def write_smooth(folder: Path) -> None:
    """Write the method of docs/adding-a-method.md as mylab/smooth.py."""
    page = ROOT / "docs" / "adding-a-method.md"
    method = next(text for kind, text in blocks(page) if kind == "python" and "class Smooth(" in text)
    (folder / "mylab").mkdir()
    (folder / "mylab" / "smooth.py").write_text(method)

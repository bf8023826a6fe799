"""The jobs. Each is a list of cases, measured one after another; a case that fails does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Protocol

from benchmarks.cases import BOUND, OURS, Contest, Growth, Result, Whole
from benchmarks.host import Maker
from benchmarks.pace import Turns
from benchmarks.peers.registry import PEERS
from benchmarks.plain import centralised, loop
from benchmarks.work import Work


class Case(Protocol):
    @property
    def name(self) -> str: ...

    def measure(self, device: str) -> Result: ...


MLP = Work()
DRAWN = replace(MLP, clients=500, samples=120, cohort=100)
CNN = Work("climb_cnn", shape=(3, 32, 32), clients=100, samples=500, batch=50)
RESNET = Work("resnet18", shape=(3, 32, 32), clients=10, samples=400, batch=40, precision="bf16")
# pfl-research's CIFAR10 benchmark, with the settings of benchmarks/image_classification in its repository.
PFL = Work("pfl_cnn", shape=(3, 32, 32), clients=1000, samples=50, cohort=50, batch=10, lr=0.1, test=10_000)
PFL_ROUNDS, PFL_EVALUATION = 1500, 10
SMALL = replace(MLP, samples=64, compile=False)  # otherwise every size of the growth job would be compiled


def on_gpu(device: str) -> bool:
    return device.startswith("cuda")


def others(device: str) -> dict[str, Maker]:
    """The programs that Equipoise is compared with."""
    if not on_gpu(device):
        return {BOUND: centralised, "plain loop": loop}
    return {
        f"{BOUND}, eager": centralised,
        f"{BOUND}, CUDA graph": partial(centralised, how="graph"),
        f"{BOUND}, best": partial(centralised, how="best"),
        "plain loop": loop,
    }


def mlp(device: str) -> list[Case]:
    return [Contest("mlp", {OURS: MLP}, others(device))]


def drawn(device: str) -> list[Case]:
    return [Contest("drawn", {OURS: DRAWN}, others(device))]


def cnn(device: str) -> list[Case]:
    if not on_gpu(device):
        return [Contest("cnn", {OURS: replace(CNN, clients=10, samples=100)}, others(device))]
    return [
        Contest(f"cnn, {precision}", {OURS: replace(CNN, precision=precision)}, others(device))
        for precision in ("bf16", "tf32")
    ]


def resnet(device: str) -> list[Case]:
    """On a CPU the network is narrower, since a round of the full one takes minutes."""
    small = replace(RESNET, options={"width": 16}, samples=40, precision="auto")
    return [Contest("resnet", {OURS: RESNET if on_gpu(device) else small}, others(device))]


def pfl(device: str) -> list[Case]:
    """On a CPU the cohort is smaller, and only some rounds are measured, since all of them take hours."""
    if not on_gpu(device):
        return [Contest("pfl", {OURS: replace(PFL, cohort=10)}, others(device))]
    whole = Whole("pfl, end to end", PFL, PFL_ROUNDS, PFL_EVALUATION)
    return [whole, Contest("pfl", {OURS: PFL}, others(device))]


def ragged(device: str) -> list[Case]:
    return [_against_equal(MLP)]


def ragged_cnn(device: str) -> list[Case]:
    return [_against_equal(replace(CNN, precision="bf16") if on_gpu(device) else replace(CNN, samples=20, batch=10))]


def _against_equal(work: Work) -> Case:
    return Contest(f"ragged, {work.model}", {"ragged": replace(work, alpha=0.1), "equal sizes": work})


def chains(device: str) -> list[Case]:
    """Turns are multiples of five rounds, since CLIMB asks all clients for their losses in every fifth round."""
    methods = {"fedavg": "fedavg", "scaffold": "scaffold", "fedshift": "fedshift", "climb": "climb(every=5)"}
    works = {name: replace(MLP, method=method) for name, method in methods.items()}
    return [Contest("chains", works, turns=Turns(count=3, most=5.0, multiple=5))]


def growth(device: str) -> list[Case]:
    bound: Maker = partial(centralised, how="graph") if on_gpu(device) else centralised

    def grow(name: str, axis: str, points: dict[float, Work]) -> Growth:
        return Growth(name, axis, points, bound)

    thousand = replace(SMALL, clients=1000)
    return [
        grow(
            "clients", "clients, all in every round", {n: replace(SMALL, clients=n) for n in (10, 30, 100, 300, 1000)}
        ),
        grow("cohort", "cohort, of 1,000 clients", {n: replace(thousand, cohort=n) for n in (10, 100, 300)}),
        grow(
            "model",
            "parameters",
            {_parameters(w): replace(SMALL, options={"hidden": [w, w]}) for w in (32, 128, 512)},
        ),
        grow(
            "raggedness",
            "alpha of the Dirichlet partition",
            {alpha: replace(SMALL, alpha=alpha) for alpha in (0.1, 1.0, 10.0)},
        ),
    ]


def _parameters(width: int) -> int:
    """The number of parameters of a network with two hidden layers of this width."""
    widths = [784, width, width, 10]
    return sum((before + 1) * after for before, after in pairwise(widths))


def peers(device: str) -> list[Case]:
    return list(PEERS)


JOBS: dict[str, Callable[[str], Sequence[Case]]] = {
    "mlp": mlp,
    "drawn": drawn,
    "cnn": cnn,
    "resnet": resnet,
    "pfl": pfl,
    "ragged": ragged,
    "ragged_cnn": ragged_cnn,
    "chains": chains,
    "growth": growth,
    "peers": peers,
}

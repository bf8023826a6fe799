"""Astraea and the methods that papers compare with, each with its reference loop."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.methods import AFL, CUCB, QFFL, Active, Astraea, FedCurv, FedDyn, FedNTD, FedPD, FedProx, Scaffold
from tests.reference.astraea import astraea, rebalanced
from tests.reference.fair import afl, qffl
from tests.reference.fedcurv import fedcurv
from tests.reference.fedntd import fedntd
from tests.reference.loop import State
from tests.reference.primal_dual import feddyn, fedpd
from tests.reference.scaffold import scaffold
from tests.reference.selection import active, cucb

Reference = Callable[[Federation, nn.Module, int, Local], State]

COMPARATORS: dict[str, tuple[Method, Reference]] = {
    "astraea": (
        Astraea(gamma=2, tau_d=2.0, mediator_epochs=2, augment="repeat"),
        lambda f, m, r, s: astraea(f, m, r, s, gamma=2, mediator_epochs=2, tau_d=2.0),
    ),
    "astraea, minus": (
        Astraea(gamma=4, tau_d=1.5, mediator_epochs=1, sign="minus", augment="repeat"),
        lambda f, m, r, s: astraea(f, m, r, s, gamma=4, mediator_epochs=1, tau_d=1.5, sign="minus"),
    ),
    "astraea, once, + fedprox": (
        Astraea(gamma=3, tau_d=None, mediator_epochs=2, reschedule="once") + FedProx(mu=0.3),
        lambda f, m, r, s: astraea(f, m, r, s, gamma=3, mediator_epochs=2, tau_d=None, once=True, mu=0.3),
    ),
    "astraea, resampling only, + scaffold": (  # SCAFFOLD must use the step counts after resampling
        Astraea(gamma=1, tau_d=1.2, mediator_epochs=1, augment="repeat") + Scaffold(),
        lambda f, m, r, s: scaffold(rebalanced(f, tau_d=1.2), m, r, s),
    ),
    "afl": (AFL(eta=0.5), lambda f, m, r, s: afl(f, m, r, s, eta=0.5)),
    "qffl": (QFFL(q=1.5), lambda f, m, r, s: qffl(f, m, r, s, q=1.5)),
    "qffl + fedprox": (
        QFFL(q=0.4, lipschitz=3.0) + FedProx(mu=0.3),
        lambda f, m, r, s: qffl(f, m, r, s, q=0.4, lipschitz=3.0, mu=0.3),
    ),
    "feddyn": (FedDyn(alpha=0.3), lambda f, m, r, s: feddyn(f, m, r, s, alpha=0.3)),
    "feddyn + fedprox": (
        FedDyn(alpha=0.3) + FedProx(mu=0.2),
        lambda f, m, r, s: feddyn(f, m, r, s, alpha=0.3, mu=0.2),
    ),
    "fedcurv": (FedCurv(lam=0.2), lambda f, m, r, s: fedcurv(f, m, r, s, lam=0.2)),
    "fedpd": (FedPD(eta=2.0), lambda f, m, r, s: fedpd(f, m, r, s, eta=2.0)),
    "fedntd": (FedNTD(beta=0.7, tau=1.5), lambda f, m, r, s: fedntd(f, m, r, s, beta=0.7, tau=1.5)),
    "cucb": (CUCB(), lambda f, m, r, s: cucb(f, m, r, s, alpha=0.8)[0]),
    "active": (
        Active(alpha1=0.5, alpha2=0.5, alpha3=0.3),
        lambda f, m, r, s: active(f, m, r, s, alpha1=0.5, alpha2=0.5, alpha3=0.3)[0],
    ),
}

"""How stacks of clients shrink, and one profile for many cohorts."""

from __future__ import annotations

import torch

from equipoise.engines import Serial, Stacked
from equipoise.engines.profile import Profile, envelope
from equipoise.local import Local
from equipoise.method import Chain
from equipoise.methods import Scaffold
from tests.contract.test_contract import close, rounds
from tests.federations import federation


def test_a_profile_counts_who_still_trains() -> None:
    steps = torch.tensor([4, 2, 2, 1])
    assert Profile.of(steps, torch.tensor([16, 8, 7, 3])) == Profile(16, (4, 3, 1, 1), 1)


def test_a_profile_takes_in_what_fits_and_nothing_else() -> None:
    wide = Profile(20, (3, 3, 2), 1)
    fits = Profile(20, (3, 2), 1)
    assert wide.around(fits) == wide
    for other in (
        Profile(21, (3, 2), 1),
        Profile(20, (3, 3, 3), 3),
        Profile(20, (2, 1), 1),
        Profile(9, (3, 1, 1, 1), 1),
    ):
        assert wide.around(other) == other
    assert Profile(20, (3, 3, 2), 2).around(fits) == fits  # it would not let the short ones stand still


def test_the_envelope_has_room_for_every_cohort_drawn() -> None:
    fed = federation(sizes=(3, 40, 9, 17, 1, 26, 8, 12), cohort=3, local=Local(batch=4))
    wide = envelope(fed, fed.offsets, fed.local)
    for round in range(64):
        n = (fed.offsets.diff())[fed.draw(round)]
        assert wide.around(Profile.of(fed.local.batches(n)[1], n)) == wide


def test_cohorts_that_share_a_profile_train_as_they_would_alone() -> None:
    fed = federation(sizes=(3, 18, 9, 17, 1, 6), cohort=3, local=Local(lr=0.1, batch=4))
    torch.compiler.reset()
    one, other = Stacked(fed, precision="float64", compile="eager"), Serial(fed, precision="float64")
    close(rounds(fed, Chain(Scaffold()), one, 4).params, rounds(fed, Chain(Scaffold()), other, 4).params, 1e-10)
    close(one.memory.save(), other.memory.save(), 1e-10)

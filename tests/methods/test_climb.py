"""CLIMB: its arithmetic, its presets, what the server learns, and that it learns classes that FedAvg does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import Stacked
from equipoise.core import expression, tree
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation, Split
from equipoise.core.local import Local
from equipoise.core.method import FedAvg, Method
from equipoise.core.network import Network
from equipoise.core.round import one_round, start
from equipoise.core.turn import State
from equipoise.methods import METHODS, QFFL, Climb, FedSGD, FedShift
from equipoise.methods.climb import DualStep
from equipoise.methods.climb_settings import PRESETS
from equipoise.runs.ledger import ledger
from equipoise.runs.training import Settings, Training, fit
from tests.federations import federation


def run(fed: Federation, method: Method, rounds: int, engine: Stacked | None = None) -> tuple[State, Stacked]:
    engine = engine or Stacked(fed, precision="float64")
    chain = Chain(method)
    state = start(fed, chain, engine)
    for _ in range(rounds):
        state, _ = one_round(state, fed, chain, engine)
    return state, engine


def memory(engine: Stacked) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = engine.memory.save()["climb"]["rows"]
    return kept


def losses(fed: Federation, engine: Stacked, state: State) -> Tensor:
    """The plain mean cross entropy of every client for the model of a state."""
    outputs = engine.outputs(state.params, state.buffers, fed.x[fed.indices])
    each = nn.functional.cross_entropy(outputs, fed.y[fed.indices], reduction="none")
    return torch.stack([part.mean() for part in each.split((fed.offsets[1:] - fed.offsets[:-1]).tolist())])


# -- the step of a multiplier --------------------------------------------------------------------------------------
def step(
    loss: float, dual: float, mean: float = 1.0, slack: float | None = None, u: float = 0.0, **options: Any
) -> Any:
    settings = {"sized": False, "eta": 0.5, "epsilon": 0.1, "cap": 2.0, "slack_eta": 0.2} | options
    kept = {"loss": torch.tensor(loss), "dual": torch.tensor(dual)} | (
        {} if slack is None else {"slack": torch.tensor(u)}
    )
    question = DualStep(slack=slack, **settings)
    return question.answer({}, torch.tensor(10), {"mean_loss": torch.tensor(mean)}, kept)


@pytest.mark.parametrize(
    ("loss", "dual", "want"),
    [(2.1, 0.3, 0.8), (1.1, 0.3, 0.3), (0.9, 0.3, 0.2), (0.0, 0.3, 0.0), (9.0, 0.3, 2.0)],
    ids=["above", "at the tolerance", "below", "not below zero", "not above the cap"],
)
def test_a_multiplier_follows_the_excess_of_its_loss(loss: float, dual: float, want: float) -> None:
    answer, kept = step(loss, dual)
    assert float(kept["dual"]) == pytest.approx(want)
    assert float(answer["change"]) == pytest.approx(want - dual)


def test_with_weighting_by_size_a_change_is_multiplied_by_the_samples() -> None:
    answer, _ = step(2.1, 0.3, sized=True)
    assert float(answer["change"]) == pytest.approx(10 * 0.5)


def test_slack_widens_the_tolerance_and_follows_the_new_multiplier() -> None:
    _, kept = step(2.1, 0.3, slack=1.5, u=0.4)
    dual = 0.3 + 0.5 * (2.1 - 1.0 - 0.1 - 0.4)
    assert float(kept["dual"]) == pytest.approx(dual)
    assert float(kept["slack"]) == pytest.approx(0.4 + 0.2 * (dual - 1.5 * 0.4))
    _, kept = step(0.0, 0.0, slack=9.0, u=0.4)
    assert float(kept["slack"]) == 0


# -- the round -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_weights_average_to_one_over_all_clients(weighting: str) -> None:
    fed = federation()
    state, engine = run(fed, Climb(eta=3.0, every=1, weighting=weighting), 2)  # type: ignore[arg-type]
    w = 1 + memory(engine)["dual"] - state.slots["climb"]["mean_dual"]
    sizes = (fed.offsets[1:] - fed.offsets[:-1]).double()
    share = sizes / sizes.sum() if weighting == "size" else torch.full_like(sizes, 1 / len(sizes))
    assert float(share @ w) == pytest.approx(1, abs=1e-12)
    assert float(w.std()) > 0.05


def test_losses_are_the_plain_cross_entropy_of_the_new_model_in_any_chain() -> None:
    fed = federation()
    state, engine = run(fed, Climb(every=3) + FedShift(prior="uniform"), 3)
    torch.testing.assert_close(memory(engine)["loss"], losses(fed, engine, state))
    assert float(state.slots["climb"]["mean_loss"]) == pytest.approx(float(losses(fed, engine, state).mean()))


def test_with_stale_timing_a_dual_step_uses_the_losses_kept_at_the_one_before() -> None:
    fed = federation()
    settings = {"eta": 1.0, "epsilon": 0.0, "cap": 9.0, "every": 2}
    state, engine = run(fed, Climb(**settings, timing="stale"), 2)  # type: ignore[arg-type]
    first = losses(fed, engine, start(fed, Chain(), Stacked(fed, precision="float64")))
    torch.testing.assert_close(memory(engine)["dual"], (first - first.mean()).clamp(min=0))
    torch.testing.assert_close(memory(engine)["loss"], losses(fed, engine, state))


def test_a_batch_sum_counts_the_batches_that_clients_train_with() -> None:
    fed = federation(local=Local(batch=4))  # clients have 7, 12, 1, 20, 5 and 9 samples
    _, engine = run(fed, Climb(scale="batch_sum"), 0)
    mean = losses(fed, engine, start(fed, Chain(), engine))
    for chain, batches in (
        (Climb(scale="batch_sum"), [2, 3, 1, 5, 2, 3]),
        (Climb(scale="batch_sum") + FedSGD(), [1] * 6),
    ):
        run(fed, chain, 0, engine)
        torch.testing.assert_close(memory(engine)["loss"], mean * torch.tensor(batches))


def test_asking_only_the_cohort_leaves_other_clients_as_they_are_and_the_mean_right() -> None:
    fed = federation(cohort=2)
    state, engine = run(fed, Climb(eta=9.0, epsilon=0.0, every=1, over="cohort"), 1)
    dual = memory(engine)["dual"]
    outside = [i for i in range(fed.clients) if i not in fed.draw(0).tolist()]
    assert float(dual[outside].abs().max()) == 0
    assert float(dual.max()) > 0
    assert int(state.slots["climb"]["answered"]) == 2
    assert float(state.slots["climb"]["mean_dual"]) == pytest.approx(float(dual.mean()))
    state, engine = run(fed, Climb(eta=9.0, epsilon=0.0, every=1, over="cohort"), 4)
    assert float(state.slots["climb"]["mean_dual"]) == pytest.approx(float(memory(engine)["dual"].mean()))


def moved(fed: Federation, method: Climb, rounds: int) -> tuple[Tensor, State]:
    state, engine = run(fed, method, rounds)
    return memory(engine)["dual"] - state.slots["climb"]["mean_dual"], state


def test_negative_weights_are_kept_unless_clipped() -> None:
    fed = federation(cohort=0)
    below, kept = moved(fed, Climb(eta=99.0, cap=9.0, every=1), 1)
    assert float(below.min()) < -1  # so some weights are negative in the next round
    _, one = moved(fed, Climb(eta=99.0, cap=9.0, every=1, negative="clip"), 1)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(kept.params), tree.leaves(one.params), strict=True))
    _, kept = moved(fed, Climb(eta=99.0, cap=9.0, every=1), 2)
    _, one = moved(fed, Climb(eta=99.0, cap=9.0, every=1, negative="clip"), 2)
    assert float(tree.norm(tree.sub(kept.params, one.params))) > 1e-3


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_without_a_dual_step_it_is_fedavg_bit_by_bit(weighting: str) -> None:
    fed = federation()
    plain = replace(fed, local=replace(fed.local, weighting=weighting))  # type: ignore[arg-type]
    one, _ = run(fed, Climb(eta=0.0, every=1, weighting=weighting), 3)  # type: ignore[arg-type]
    other, _ = run(plain, FedAvg(), 3)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(one.params), tree.leaves(other.params), strict=True))


# -- what the server learns, and what a simulation sees ------------------------------------------------------------
class Recorder(Stacked):
    """Records the clients' answers to questions of the server."""

    def ask(self, question: Any, *args: Any, **options: Any) -> Any:
        answer = super().ask(question, *args, **options)
        self.recorded = [*getattr(self, "recorded", []), (options.get("rows", False), answer)]
        return answer


def test_the_server_learns_sums_of_scalars_only() -> None:
    fed = federation()
    engine = Recorder(fed, precision="float64")
    state, _ = run(fed, Climb(every=1), 2, engine)
    assert not Climb.reveals
    # Five questions: for losses at the start, and for losses and dual steps in two rounds.
    assert [rows for rows, _ in engine.recorded] == [False] * 5
    assert {name for _, answer in engine.recorded for name in answer} == {"loss", "weight", "answered", "change"}
    assert all(leaf.dim() == 0 for _, answer in engine.recorded for leaf in answer.values())
    assert all(leaf.dim() == 0 for leaf in state.slots["climb"].values())


def test_the_ledger_lists_everything_that_is_sent_or_kept() -> None:
    lines = {(entry.direction, entry.what) for entry in ledger(Climb(slack=1.0))}
    assert {
        ("receives", "climb: mean_dual"),
        ("receives", "climb: mean_loss"),
        ("sends", "climb: loss"),
        ("sends", "climb: change"),
        ("keeps", "climb: dual"),
        ("keeps", "climb: loss"),
        ("keeps", "climb: slack"),
        ("reveals", "nothing"),
    } <= lines


def test_the_record_has_the_multipliers_and_the_violation() -> None:
    fed = federation()
    engine = Stacked(fed, precision="float64")
    *_, last = Training(fed, Climb(eta=3.0, epsilon=0.01, every=1), engine, Settings(rounds=3))
    kept = memory(engine)
    assert last.record is not None
    got = {name.removeprefix("climb."): v for name, v in last.record.items() if name.startswith("climb.")}
    excess = kept["loss"] - kept["loss"].mean() - 0.01
    want = {
        "mean_dual": kept["dual"].mean(),
        "mean_loss": kept["loss"].mean(),
        "answered": 6,
        "largest_dual": kept["dual"].max(),
        "violation": excess.max(),
        "violated": (excess > 0).double().mean(),
    }
    assert got == pytest.approx({k: float(v) for k, v in want.items()})


# -- presets -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("preset", "clients", "eta", "epsilon", "cap"),
    [
        ("mnist", 100, 0.1, 0.002, 5),
        ("mnist", 500, 0.02, 0.002, 5),
        (None, 500, 0.1, 0.002, 5),
    ],
)
def test_the_eta_of_a_preset_is_divided_by_the_clients(
    preset: str | None, clients: int, eta: float, epsilon: float, cap: float
) -> None:
    got = Climb(preset=preset).constants(clients)
    assert (got.eta, got.epsilon, got.cap) == pytest.approx((eta, epsilon, cap))


def test_the_mean_and_the_batch_sum_presets_are_equivalent_for_five_batches() -> None:
    for name in ("mnist", "cifar10"):
        ours, theirs = PRESETS[name], PRESETS[f"{name}_reference"]
        assert (ours.eta, ours.epsilon) == pytest.approx((5 * theirs.eta, theirs.epsilon / 5))


def test_given_constants_override_the_preset_and_are_not_divided_by_the_clients() -> None:
    (method,) = expression.parse("climb(preset='mnist', eta=0.5, cap=100)", METHODS)
    got = method.constants(100)
    assert (got.eta, got.epsilon, got.cap) == (0.5, 0.002, 100)
    assert str(method) == "climb(preset='mnist', eta=0.5, cap=100.0)"
    assert expression.parse(str(method), METHODS) == [method]


# -- refused -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"preset": "mnits"}, "did you mean 'mnist'"),
        ({"eta": -1.0}, "eta=-1.0"),
        ({"eta": float("nan")}, "eta=nan"),
        ({"epsilon": -0.1}, "epsilon=-0.1"),
        ({"cap": 0.0}, "cap=0.0"),
        ({"slack": 0.0}, "slack=0.0"),
        ({"every": 0}, "every=0"),
        ({"over": "some"}, "over='some'"),
        ({"weighting": "sizes"}, "did you mean 'size'"),
        ({"over": "cohort", "preset": "mnist_reference"}, "timing='fresh'"),
    ],
)
def test_a_meaningless_setting_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Climb(**settings)


def test_another_method_that_weights_clients_by_their_losses_is_refused() -> None:
    with pytest.raises(ConfigError, match="climb and qffl each weigh clients by their losses"):
        run(federation(), Climb() + QFFL(), 0)


# -- what it is for ------------------------------------------------------------------------------------------------
def one_class_per_client(clients: tuple[int, ...] = (8, 1, 8, 1), n: int = 30) -> Federation:
    """Four overlapping classes on a circle. Every client holds one class; two of the classes have only one client."""
    draw = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    y = torch.arange(4).repeat_interleave(n * torch.tensor(clients))
    test_y = torch.arange(600) % 4
    torch.manual_seed(0)
    return Federation(
        network=Network(nn.Linear(2, 4)),
        x=centres[y] + torch.randn(len(y), 2, generator=draw),
        y=y,
        offsets=n * torch.arange(sum(clients) + 1),
        indices=torch.arange(len(y)),
        classes=tuple("abcd"),
        local=Local(lr=0.1, batch=10, epochs=2, weighting="uniform"),
        minority=(1, 3),
        test=Split(centres[test_y] + torch.randn(600, 2, generator=draw), test_y),
    )


def test_it_learns_the_classes_that_fedavg_does_not() -> None:
    fed = one_class_per_client()
    plain = fit(fed, FedAvg(), rounds=60, evaluate_every=60).last
    climbing = fit(fed, Climb(eta=0.3, every=1), rounds=60, evaluate_every=60).last
    assert plain["minority_accuracy"] < 0.2
    assert climbing["minority_accuracy"] > 0.5
    assert climbing["accuracy"] > plain["accuracy"] + 0.1

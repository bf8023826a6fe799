"""The contract that every method keeps, alone and in chains. Each check says what to change where it fails.

`check_method` runs all of them on small federations with ragged clients, within seconds. `equipoise check` shows them
one by one, and the tests of the library run the same functions over its own methods.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.core import speed, tree
from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.errors import ConfigError, EquipoiseError
from equipoise.core.federation import Federation
from equipoise.core.method import Method
from equipoise.core.round import one_round, start
from equipoise.core.sums import Sums
from equipoise.core.tree import Tree
from equipoise.core.turn import State, Turn
from equipoise.engines import Serial, Simulator, stacked_engine
from equipoise.engines.stacked import Stacked
from equipoise.methods.registry import parse
from equipoise.runs import checkpoint
from equipoise.runs.ledger import ledger
from equipoise.runs.training import Settings, Snapshot, Training
from equipoise.testing.federations import EQUAL, dropout_cnn, federation, image_federation, linear5, norm_cnn
from equipoise.testing.in_process import site_engine, site_memories, without_samples
from equipoise.testing.padding import OtherBatches, OtherData

ROUNDS = 3


class ContractBroken(EquipoiseError, AssertionError):
    """A method breaks a rule of the contract; the sentence says which, and what to change."""


class Finding(NamedTuple):
    rule: str
    kept: bool | None  # None: it could not be checked here
    sentence: str  # what to change, or why it was not checked


def check_method(method: Method, *, neutral: Method | None = None) -> None:
    """Refuse a method that breaks the contract, with a line for each rule that it breaks.

    `neutral`: the same method with settings at which it does nothing, where there are such settings.
    """
    broken = [found for found in examine(method, neutral=neutral) if found.kept is False]
    if broken:
        raise ContractBroken("\n".join(f"{found.rule}: {found.sentence}" for found in broken))


def examine(method: Method, *, neutral: Method | None = None) -> Iterator[Finding]:
    """Every rule of the contract in turn, and whether the method or chain keeps it."""
    chain = Chain(method)
    for rule, check in RULES.items():
        yield _found(rule, lambda check=check: check(chain))  # type: ignore[misc]
    if neutral is not None:
        yield _found("neutral settings are FedAvg", lambda: neutral_is_fedavg(Chain(neutral), 1e-12))


class NotChecked(Exception):
    """A rule that cannot be checked here, with the reason."""


def _found(rule: str, check: Callable[[], None]) -> Finding:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            check()
    except NotChecked as reason:
        return Finding(rule, None, str(reason))
    except EquipoiseError as error:
        return Finding(rule, False, str(error))
    except Exception as error:
        return Finding(rule, False, f"it failed with {type(error).__name__}: {error}")
    return Finding(rule, True, "")


# -- what the rules are made of --------------------------------------------------------------------------------------
def rounds(fed: Federation, chain: Chain, engine: Engine, count: int, state: State | None = None) -> State:
    """So many rounds, from the start or from a state."""
    state = state or start(fed, chain, engine)
    for _ in range(count):
        state, _ = one_round(state, fed, chain, engine)
    return state


def everything(state: State, engine: Engine) -> Tree:
    """All that a run remembers, at the server and at the clients."""
    return {
        "params": state.params,
        "buffers": state.buffers,
        "slots": state.slots,
        "memory": engine.memory.save(),
    }


def compare(a: Tree, b: Tree, tolerance: float, advice: str = "expected the same") -> None:
    """Refuse trees that differ by more than the tolerance (0: in any bit), naming the leaf that differs most."""
    flat_a, flat_b = tree.flatten(a), tree.flatten(b)
    if flat_a.keys() != flat_b.keys():
        name = sorted(flat_a.keys() ^ flat_b.keys())[0]
        raise ContractBroken(f"only one of them has {name}; {advice}")
    worst, where = 0.0, ""
    for name, value in flat_a.items():
        other = flat_b[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            kinds = f"{value.dtype} {list(value.shape)} and {other.dtype} {list(other.shape)}"
            raise ContractBroken(f"{name} is {kinds}; {advice}")
        if torch.equal(value, other):
            continue
        gap = _gap(value, other)
        if gap > tolerance and gap >= worst:
            worst, where = gap, name
    if where:
        raise ContractBroken(f"{where} differs by {worst:.1e} where {tolerance:g} is allowed; {advice}")


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative where numbers are above one; infinite where one is not finite."""
    a, b = a.double(), b.double()
    gap = ((a - b).abs() / b.abs().clamp(min=1)).max()
    return float(gap) if bool(gap.isfinite()) else float("inf")


def plain(fed: Federation, **options: Any) -> Stacked:
    return Stacked(fed, precision="float64", **options)


def suitable(chain: Chain) -> tuple[Federation, str]:
    """A federation in which the chain has a meaning, and the name of its model: samples in a row, or images."""
    refused: ConfigError | None = None
    for model in (linear5, dropout_cnn):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            fed = federation(model()) if model is linear5 else image_federation(model())
        try:
            chain.check(fed.server_view, chain)
        except ConfigError as error:
            refused = refused or error
            continue
        return fed, f"{model.__module__}:{model.__name__}"
    assert refused is not None
    raise refused


def equal_clients(chain: Chain) -> Federation:
    """The same with clients of one size."""
    fed, _ = suitable(chain)
    sizes = torch.tensor([0, *EQUAL]).cumsum(0)
    return replace(fed, offsets=sizes, indices=fed.indices[: int(sizes[-1])], cohort=2)


# -- rules -----------------------------------------------------------------------------------------------------------
def is_its_configuration(chain: Chain) -> None:
    for method in chain:
        given = {field.name: getattr(method, field.name) for field in fields(method)}
        if type(method)(**given) != method:
            raise ContractBroken(f"{method.name} made anew from its fields is another: set no field in __post_init__")
    try:
        again = parse(str(chain))
    except ConfigError as error:
        raise ContractBroken(
            f"the expression {str(chain)!r} cannot be read back ({error}); define the class at the top of a module,"
            " with settings that are numbers, texts, booleans or tuples of these"
        ) from error
    if again != chain:
        raise ContractBroken(f"{str(chain)!r} is read back as {str(again)!r}; compare settings by their values")


def padding_in_data_is_masked(chain: Chain) -> None:
    fed, _ = suitable(chain)
    one, other = plain(fed, width=6), OtherData(fed, precision="float64", width=6)
    advice = (
        "begin or finish reads padding: leave out the places of `data` where `data.mask` is false, as in"
        " torch.where(data.mask, values, 0).sum()"
    )
    _same(fed, chain, one, other, 0, advice)


def padding_in_batches_is_masked(chain: Chain) -> None:
    fed, _ = suitable(chain)
    one, other = plain(fed, width=6), OtherBatches(fed, precision="float64", width=6)
    advice = (
        "a tap mixes samples of a batch and counts its padding: leave out the places where `env.mask` is false, as in"
        " torch.where(env.mask, losses, 0).sum() / env.mask.sum()"
    )
    _same(fed, chain, one, other, 0, advice)


def engines_agree(chain: Chain, fed: Federation | None = None, count: int = ROUNDS, tolerance: float = 1e-10) -> None:
    fed = fed or suitable(chain)[0]
    one, other = plain(fed, width=3), Serial(fed, precision="float64")
    advice = (
        "the stacked engine (vmap, padded batches) and the serial one (true short batches) disagree: taps at a client"
        " must be pure functions of their arguments and `env`, and leave padding out"
    )
    _same(fed, chain, one, other, tolerance, advice, count)


def engines_agree_on_images(chain: Chain, network: Callable[[], nn.Module] | None = None) -> None:
    for model in (norm_cnn, dropout_cnn) if network is None else (network,):
        torch.manual_seed(4)
        engines_agree(chain, image_federation(model()), 2, 1e-9)


def sites_agree(chain: Chain, fed: Federation | None = None, model: str = "", count: int = ROUNDS) -> None:
    found = suitable(chain) if fed is None else (fed, model)
    with tempfile.TemporaryDirectory() as folder:
        local, remote = plain(found[0], width=3), site_engine(found[0], chain, Path(folder), found[1])
        want = rounds(found[0], chain, local, count)
        got = rounds(without_samples(found[0]), chain, remote, count)
        advice = (
            "real sites disagree with the simulation: what a tap needs must be in `env`, `data`, the message or the"
            " memory, since a site has nothing else, and the server has no samples of the clients"
        )
        compare(everything(got, remote) | {"memory": site_memories(remote, Path(folder))},
                everything(want, local), 1e-9 if want.buffers else 1e-10, advice)  # fmt: skip


def resume_is_bitwise(chain: Chain, make: Callable[[Federation], Simulator] | None = None) -> None:
    """Cut after two rounds, saved to a file, and resumed as a run is: with an engine that has seen nothing."""
    fed, settings = suitable(chain)[0], Settings(rounds=4)
    resume_from_a_checkpoint(fed, chain, settings, make or (lambda fed: stacked_engine()(fed, width=4)))


def resume_from_a_checkpoint(
    fed: Federation, chain: Chain, settings: Settings, make: Callable[[Federation], Simulator]
) -> None:
    whole = Training(fed, chain, make(fed), settings)
    last = next(step.snapshot() for step in whole if step.last)
    with tempfile.TemporaryDirectory() as folder:
        first = Training(fed, chain, make(fed), settings)
        half = next(step.snapshot() for step in first if step.round == 2)
        checkpoint.save(Path(folder), half.trees(), {"round": half.state.round, "notes": half.notes})
        trees, meta = checkpoint.load(Path(folder))
        second = Training(fed, chain, make(fed), settings, Snapshot.of(trees, meta["round"], meta["notes"]))
        again = next(step.snapshot() for step in second if step.last)
    advice = "state escapes the checkpoint: keep it in the slot or in the memory, never in the method or a module"
    compare(again.trees(), last.trees(), 0, advice)


def repeats_itself(chain: Chain) -> None:
    fed, _ = suitable(chain)
    advice = (
        "a second run differs from the first: draw from keys (equipoise.core.random), never from torch's or Python's"
        " generators, and keep no state outside slot, memory and note"
    )
    _same(fed, chain, plain(fed, width=3), plain(fed, width=3), 0, advice)


def is_one_graph(chain: Chain) -> None:
    if (why := speed.off()) is not None:
        raise NotChecked(f"compiling needs the fast code, which is off: {why}")
    fed = equal_clients(chain)
    torch.compiler.reset()
    engine: Any = stacked_engine()(fed, precision="float64", compile="eager")
    engine.compile_around = True
    try:
        rounds(fed, chain, engine, 1)
    except EquipoiseError as error:
        raise ContractBroken(
            f"torch cannot trace its taps at a client as one graph: use tensor operations only, no .item(), no Python"
            f" branch on a tensor's value, no print ({str(error).splitlines()[0][:300]})"
        ) from error


def order_does_not_matter(chain: Chain) -> None:
    fed, _ = suitable(chain)
    (one, memory), (other, same) = _train(fed, chain, [[0, 1, 3, 4]]), _train(fed, chain, [[4, 0, 3, 1]])
    advice = "a tap at a client depends on its place in the cohort: use env.key and client numbers, never positions"
    compare(one.delta, other.delta, 1e-12, advice)
    compare(one.uploads, other.uploads, 1e-12, advice)
    compare(memory, same, 1e-12, advice)


def empty_lanes_change_nothing(chain: Chain) -> None:
    fed, _ = suitable(chain)
    (one, memory), (other, same) = _train(fed, chain, [[0, 1, 3]]), _train(fed, chain, [[0, -1, 1, 3, -1]])
    advice = "a lane without a client (-1 in the plan) changes the result: address must use the ids it is given only"
    compare(one.delta, other.delta, 0, advice)
    compare(memory, same, 0, advice)
    if one.clients != other.clients:
        raise ContractBroken(f"{other.clients} clients are counted where {one.clients} trained; {advice}")


def a_round_without_clients_leaves_the_model(chain: Chain) -> None:
    fed, _ = suitable(chain)
    nobody, memory = _train(fed, chain, [[-1, -1]])
    before = plain(fed)
    start(fed, chain, before)
    advice = "a round in which no client trains must leave model and memories as they are"
    compare(memory, before.memory.save(), 0, advice)
    compare(nobody.delta, tree.zeros(nobody.delta), 0, advice)


def trees_keep_their_shape(chain: Chain) -> None:
    fed, _ = suitable(chain)
    engine = plain(fed)
    state = start(fed, chain, engine)
    before = _shapes(state.slots)
    for number in range(2):
        state, sums = one_round(state, fed, chain, engine)
        if (after := _shapes(state.slots)) != before:
            name = next(iter(sorted(set(after.items()) ^ set(before.items()))))[0]
            raise ContractBroken(
                f"the slot's {name} has another shape or type after round {number + 1}: return from close and update"
                " the leaves that init returned, with the same shapes and types"
            )
        for name, leaf in tree.flatten(sums.uploads).items():
            if not isinstance(leaf, Tensor):
                raise ContractBroken(f"the upload {name} is a {type(leaf).__name__}: upload tensors only")


def ledger_is_complete(chain: Chain) -> None:
    for entry in ledger(chain, suitable(chain)[0]):
        if not entry.meaning.removesuffix("summed").rstrip("; ") or entry.meaning.startswith("answer to "):
            method, _, leaf = entry.what.partition(": ")
            raise ContractBroken(
                f"nothing says what {entry.what} means, which a client {entry.direction}: add"
                f" {leaf!r} to `words` of {method}, for the person who must approve what leaves a site"
            )


def neutral_is_fedavg(neutral: Chain, tolerance: float) -> None:
    """Equal clients, since some methods do nothing only where all take the same steps."""
    fed = equal_clients(neutral)
    one, other = plain(fed), plain(fed)
    left, right = rounds(fed, neutral, one, ROUNDS), rounds(fed, Chain(), other, ROUNDS)
    compare(left.params, right.params, tolerance, "with its neutral settings the method must do nothing")


RULES: dict[str, Callable[[Chain], None]] = {
    "a method is its configuration": is_its_configuration,
    "padding in local data is masked": padding_in_data_is_masked,
    "padding in batches is masked": padding_in_batches_is_masked,
    "a run repeats itself to the bit": repeats_itself,
    "the stacked engine equals the serial one": engines_agree,
    "also with batch norm and dropout": engines_agree_on_images,
    "real sites equal the stacked engine": sites_agree,
    "resume is bitwise": resume_is_bitwise,
    "taps at a client are one graph": is_one_graph,
    "the order of clients does not matter": order_does_not_matter,
    "an empty lane changes nothing": empty_lanes_change_nothing,
    "a round without clients leaves the model": a_round_without_clients_leaves_the_model,
    "slots and uploads keep their shapes": trees_keep_their_shape,
    "the ledger is complete": ledger_is_complete,
}


# -- inside ----------------------------------------------------------------------------------------------------------
def _same(
    fed: Federation, chain: Chain, one: Engine, other: Engine, tolerance: float, advice: str, count: int = ROUNDS
) -> None:
    left, right = rounds(fed, chain, one, count), rounds(fed, chain, other, count)
    compare(everything(left, one), everything(right, other), tolerance, advice)


def _train(fed: Federation, chain: Chain, plan: list[list[int]]) -> tuple[Sums, Tree]:
    """The sums of one training with a plan written by hand, and the memories after it."""
    engine = plain(fed, width=3)
    state = start(fed, chain, engine)
    turn = Turn.begin(fed, engine, state)
    with torch.no_grad():
        sums = engine.train(state, torch.tensor(plan), chain, chain.local(fed.local), turn)
    return sums, engine.memory.save()


def _shapes(values: Tree) -> dict[str, str]:
    return {name: f"{leaf.dtype} {list(leaf.shape)}" for name, leaf in tree.flatten(values).items()}

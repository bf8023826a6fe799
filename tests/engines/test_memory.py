"""What clients keep between rounds: room only for those who were seen, and a limit."""

from __future__ import annotations

import pytest
import torch

from equipoise.core import tree
from equipoise.core.errors import TrainingError
from equipoise.core.tree import Tree
from equipoise.engines.memory import GIB, ClientMemory, Memories

ROW = 2 * 4 + 8  # bytes of one memory below


def initial() -> Tree:
    return {"a": torch.tensor([1.0, 2.0]), "deep": {"n": torch.tensor(7)}}


def memory(clients: int = 100, limit: int = GIB) -> ClientMemory:
    return ClientMemory("toy", initial(), clients, limit)


def rows(*values: float) -> Tree:
    x = torch.tensor(values, dtype=torch.float32)
    return {"a": torch.stack([x, -x], 1), "deep": {"n": x.long()}}


def room(kept: ClientMemory) -> int:
    return len(kept.stack["a"])


def test_a_client_never_seen_has_the_initial_memory() -> None:
    for kept in (memory(), memory()):
        got = kept.get(torch.tensor([5, 99]))
        assert got["a"].tolist() == [[1, 2], [1, 2]]
        assert got["deep"]["n"].tolist() == [7, 7]
        kept.put(torch.tensor([5]), rows(3))
        assert kept.get(torch.tensor([99, 5]))["a"].tolist() == [[1, 2], [3, -3]]


def test_what_is_put_comes_back_in_any_order() -> None:
    kept = memory()
    kept.put(torch.tensor([8, 2, 50]), rows(8, 2, 50))
    kept.put(torch.tensor([3, 2]), rows(3, 22))
    got = kept.get(torch.tensor([2, 3, 50, 8, 0]))
    assert got["deep"]["n"].tolist() == [22, 3, 50, 8, 7]
    assert got["a"][:, 0].tolist() == [22, 3, 50, 8, 1]


def test_what_was_got_does_not_change_afterwards() -> None:
    kept = memory()
    before = kept.get(torch.tensor([1]))
    kept.put(torch.tensor([1]), rows(3))
    after = kept.get(torch.tensor([1]))
    kept.put(torch.tensor([1]), rows(4))
    assert before["deep"]["n"].item() == 7
    assert after["deep"]["n"].item() == 3


def test_room_is_made_only_for_clients_that_were_seen() -> None:
    kept = memory(clients=1_000_000)
    kept.get(torch.arange(1000))
    assert room(kept) == 0
    kept.put(torch.arange(500, 600), tree.map(lambda leaf: leaf.expand(100, *leaf.shape), initial()))
    assert kept.seen == 100
    assert 100 <= room(kept) <= 200


def test_a_client_twice_in_one_call_takes_one_row() -> None:
    kept = memory(clients=3)
    for _ in range(3):
        kept.put(torch.tensor([0, 1, 0, 1, 0]), rows(5, 6, 5, 6, 5))
    assert kept.seen == 2
    assert kept.get(torch.tensor([0, 1, 2]))["deep"]["n"].tolist() == [5, 6, 7]


def test_the_limit_is_kept_and_said() -> None:
    kept = memory(limit=10 * ROW)
    kept.put(torch.arange(10), tree.map(lambda leaf: leaf.expand(10, *leaf.shape), initial()))
    assert room(kept) == 10
    with pytest.raises(TrainingError) as caught:
        kept.put(torch.tensor([3, 10]), rows(1, 2))
    assert str(caught.value) == (
        "train.memory_gib = 1.49012e-07: toy keeps 16 bytes at each client, and 11 clients seen so far need 0.00 GiB;"
        " raise the limit, or take a smaller model, fewer clients or a method that keeps less"
    )
    assert kept.seen == 10
    assert kept.get(torch.tensor([3]))["deep"]["n"].item() == 7
    kept.put(torch.tensor([3]), rows(1))  # those who have room may still change


def test_nothing_to_remember_costs_nothing() -> None:
    kept = ClientMemory("nothing", {}, 1_000_000, 0)
    kept.put(torch.tensor([1]), {})
    assert kept.get(torch.tensor([1])) == {}
    assert kept.save() == {}
    assert len(kept.place) == 0


def test_saved_memories_are_loaded_bit_by_bit() -> None:
    kept, other = memory(), memory()
    kept.put(torch.tensor([8, 2, 50]), rows(0.1, 1e-40, 3))
    saved = kept.save()
    assert saved["clients"].tolist() == [2, 8, 50]
    other.load(saved)
    everybody = torch.arange(100)
    assert all(
        torch.equal(a, b)
        for a, b in zip(tree.leaves(kept.get(everybody)), tree.leaves(other.get(everybody)), strict=True)
    )
    assert other.seen == 3
    kept.put(torch.tensor([2]), rows(9))
    assert other.get(torch.tensor([2]))["deep"]["n"].item() == 0


def test_a_memory_nobody_has_is_not_saved() -> None:
    assert memory().save() == {}
    memory().load({})


def test_methods_have_rows_of_their_own() -> None:
    both = Memories({"big": initial(), "small": {"n": torch.tensor(0)}, "none": {}}, 100, GIB)
    both.put(torch.arange(50), {"small": {"n": torch.arange(50)}})
    both.put(torch.tensor([7]), {"big": rows(7), "small": {"n": torch.tensor([70])}, "none": {}})
    assert both.methods["big"].seen == 1
    assert both.methods["small"].seen == 50
    saved = both.save()
    assert saved.keys() == {"big", "small"}
    again = Memories({"big": initial(), "small": {"n": torch.tensor(0)}, "none": {}}, 100, GIB)
    again.load(saved)
    assert again.methods["small"].get(torch.tensor([6, 7, 60]))["n"].tolist() == [6, 70, 0]
    assert again.methods["big"].get(torch.tensor([7]))["deep"]["n"].tolist() == [7]

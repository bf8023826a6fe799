"""The versions of a site's memories: nothing is applied twice, and versions that the server may need are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipoise.core.errors import CheckpointError
from equipoise.core.tree import Tree
from equipoise.deploy.versions import NEVER, MemoryLost, Version, Versions


def memory(value: float) -> Tree:
    return {"scaffold": {"rows": {"c": torch.tensor([value])}, "clients": torch.tensor([0])}}


def value(kept: Tree) -> float:
    return float(kept["scaffold"]["rows"]["c"])


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path / "site" / "run")


def test_a_version_comes_back_and_a_new_client_has_none(versions: Versions) -> None:
    assert versions.all() == []
    assert versions.read(NEVER) == {}
    versions.write(Version(0, 1), [NEVER], memory(3.0))
    back = versions.read(Version(0, 1))
    assert value(back) == 3.0
    assert back["scaffold"]["clients"].dtype == torch.int64
    assert versions.folder.stat().st_mode & 0o077 == 0  # only the user of the site can read it


def test_a_repeated_request_is_applied_once(versions: Versions) -> None:
    def request(base: Version, version: Version) -> float:
        """A client that counts requests: like a site, it reads the version `base` and writes a new version."""
        kept = versions.read(base)
        count = value(kept) + 1 if kept else 1.0
        versions.write(version, [base], memory(count))
        return count

    assert request(NEVER, Version(0, 0)) == 1
    assert request(Version(0, 0), Version(0, 1)) == 2
    assert request(Version(0, 0), Version(0, 1)) == 2  # the reply was lost; the server asks again
    assert request(Version(0, 1), Version(1, 0)) == 3
    assert request(Version(1, 0), Version(2, 0)) == 4
    assert request(Version(0, 1), Version(1, 0)) == 3  # the server went back to the end of round 1
    assert request(Version(1, 0), Version(2, 0)) == 4


def test_a_version_that_the_server_never_used_is_harmless(versions: Versions) -> None:
    versions.write(Version(0, 0), [NEVER], memory(1.0))
    versions.write(Version(1, 0), [Version(0, 0)], memory(2.0))  # this reply was late, so the server never used it
    versions.write(Version(2, 0), [Version(0, 0)], memory(3.0))
    assert value(versions.read(Version(0, 0))) == 1.0
    assert value(versions.read(Version(2, 0))) == 3.0


def test_versions_are_in_order_of_round_then_phase(versions: Versions) -> None:
    made = [Version(-1, 3), Version(2, 0), Version(0, 11), Version(0, 2), Version(10, 0)]
    for version in made:
        versions.write(version, made, memory(0.0))
    assert versions.all() == [Version(-1, 3), Version(0, 2), Version(0, 11), Version(2, 0), Version(10, 0)]


def test_before_the_first_round_there_are_versions_too(versions: Versions) -> None:
    versions.write(Version(-1, 0), [NEVER], memory(1.0))
    versions.write(Version(-1, 1), [Version(-1, 0)], memory(2.0))
    versions.write(Version(0, 0), [Version(-1, 1)], memory(3.0))
    assert value(versions.read(Version(-1, 1))) == 2.0
    assert Version(-1, 0) not in versions.all()
    assert value(versions.read(Version(0, 0))) == 3.0


def test_needed_versions_are_kept_and_the_others_deleted(versions: Versions) -> None:
    base, checkpoint = NEVER, Version(1, 1)
    for round in range(8):
        needed = [checkpoint] if round > 1 else []
        for phase in range(2):
            version = Version(round, phase)
            versions.write(version, [base, *needed], memory(float(10 * round + phase)))
            assert base == NEVER or base in versions.all()
            base = version
        before = [Version(r, 1) for r in (round - 2, round - 1) if r >= 0]
        assert set(before) <= set(versions.all())  # the last versions of the two rounds before
    assert versions.all() == [Version(1, 1), Version(5, 1), Version(6, 1), Version(7, 0), Version(7, 1)]
    assert value(versions.read(checkpoint)) == 11.0


def test_the_base_of_a_client_that_was_long_away_is_kept(versions: Versions) -> None:
    for round in (0, 1, 2):
        versions.write(Version(round, 0), [NEVER], memory(float(round)))
    versions.write(Version(50, 0), [Version(0, 0)], memory(50.0))
    assert versions.all() == [Version(0, 0), Version(1, 0), Version(2, 0), Version(50, 0)]
    versions.write(Version(51, 0), [Version(50, 0)], memory(51.0))
    assert versions.all() == [Version(2, 0), Version(50, 0), Version(51, 0)]


def test_after_the_server_went_back_later_versions_are_harmless(versions: Versions) -> None:
    for round in range(4):
        versions.write(Version(round, 0), [Version(round - 1, 0)], memory(float(round)))
    versions.write(Version(2, 0), [Version(1, 0)], memory(-2.0))
    assert value(versions.read(Version(2, 0))) == -2.0
    assert value(versions.read(Version(1, 0))) == 1.0
    assert value(versions.read(Version(3, 0))) == 3.0  # until the server repeats that round


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text"])
def test_a_damaged_version_is_reported_as_lost(versions: Versions, damage: str) -> None:
    versions.write(Version(4, 0), [NEVER], memory(1.0))
    versions.write(Version(4, 1), [Version(4, 0)], memory(2.0))
    file = versions._file(Version(4, 0))
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "cut": content[:-1], "text": b"not tensors at all"}[damage])
    with pytest.raises(MemoryLost, match=r"memory of round 5\.0 is not in .*, which has .*round 5\.1"):
        versions.read(Version(4, 0))
    assert value(versions.read(Version(4, 1))) == 2.0


def test_an_empty_folder_says_that_it_has_nothing(versions: Versions) -> None:
    with pytest.raises(MemoryLost, match=r"memory of round 1\.2 is not in .*, which has nothing"):
        versions.read(Version(0, 2))


def test_other_files_are_not_versions(versions: Versions) -> None:
    versions.write(Version(0, 0), [NEVER], memory(1.0))
    for name in ("round-00000001-0001.safetensors.partial", "round-x.safetensors", "notes.txt"):
        (versions.folder / name).write_bytes(b"")
    assert versions.all() == [Version(0, 0)]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        Versions(tmp_path / "file" / "run").write(Version(0, 0), [NEVER], memory(1.0))

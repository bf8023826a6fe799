"""A user's own tables: what can be loaded, and the error for each fault."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.core.errors import ConfigError, DataError
from equipoise.data import load

ROWS = [(30 + i, 0.5 * i, ["benign", "malignant"][i % 2], f"site {i % 3}") for i in range(30)]


def write_csv(path: Path, rows: list[Any] = ROWS, header: str = "age,dose,diagnosis,hospital") -> Path:
    path.write_text("\n".join([header, *(",".join(str(cell) for cell in row) for row in rows)]) + "\n")
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    import pyarrow
    from pyarrow import parquet

    if not columns:
        names = ("age", "dose", "diagnosis", "hospital")
        columns = {name: list(values) for name, values in zip(names, zip(*ROWS, strict=True), strict=True)}
    parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_with_names_and_clients(kind: str, tmp_path: Path) -> None:
    path = (write_csv if kind == "csv" else write_parquet)(tmp_path / f"t.{kind}")
    data = load(str(path), label="diagnosis", client="hospital", test=0)
    assert (data.x == np.array([row[:2] for row in ROWS], np.float32)).all()
    assert data.x.dtype == np.float32
    assert data.classes == ("benign", "malignant")
    assert data.columns == ("age", "dose")
    assert data.y.tolist() == [0, 1] * 15
    assert data.roster == ("site 0", "site 1", "site 2")
    assert data.client is not None
    assert data.client.tolist() == [0, 1, 2] * 10
    assert data.mean == pytest.approx((44.5, 7.25))
    assert data.std[0] == pytest.approx(np.arange(30).std())
    assert data.test_x is None


def test_csv_and_parquet_hold_out_the_same_rows(tmp_path: Path) -> None:
    options: dict[str, Any] = {"label": "diagnosis", "client": "hospital", "drop": ["dose"], "seed": 5}
    a = load(str(write_csv(tmp_path / "t.csv")), **options)
    b = load(str(write_parquet(tmp_path / "t.parquet")), **options)
    assert a.test_x is not None
    assert b.test_x is not None
    assert a.x.shape == (24, 1)
    assert a.test_x.tolist() == b.test_x.tolist()
    assert sorted([*a.x[:, 0], *a.test_x[:, 0]]) == list(range(30, 60))


def test_the_test_set_in_a_file_of_its_own(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv")
    write_csv(tmp_path / "test.csv", [("benign", 1, 2, "x"), ("other", 3, 4, "x")], "diagnosis,dose,age,hospital")
    data = load("train.csv", tmp_path, label="diagnosis", client="hospital", test="test.csv")
    assert data.test_x is not None
    assert data.test_y is not None
    assert data.test_x.tolist() == [[2, 1], [4, 3]]  # columns are matched by name
    assert data.classes == ("benign", "malignant", "other")
    assert data.test_y.tolist() == [0, 2]
    with pytest.raises(DataError, match=r"test file no\.csv does not exist"):
        load("train.csv", tmp_path, label="diagnosis", drop=["hospital"], test="no.csv")
    write_csv(tmp_path / "less.csv", [(1, "benign", "x")], "dose,diagnosis,hospital")
    with pytest.raises(DataError, match=r"less\.csv has no column 'age', which .*train\.csv has"):
        load("train.csv", tmp_path, label="diagnosis", client="hospital", test="less.csv")


@pytest.mark.parametrize(
    ("labels", "classes", "codes"),
    [
        (["10", "9", "10", "2"], ("2", "9", "10"), [2, 1, 2, 0]),
        (["1.0", "1", "0.0", "1e0"], ("0", "1"), [1, 1, 0, 1]),
        (["-1", "1", "-1", "1"], ("-1", "1"), [0, 1, 0, 1]),
        (["1", "b", "1", "a"], ("1", "a", "b"), [0, 2, 0, 1]),
        ([" yes", "no ", "yes", "no"], ("no", "yes"), [1, 0, 1, 0]),
    ],
)
def test_labels_are_whole_numbers_or_names(
    labels: list[str], classes: tuple[str, ...], codes: list[int], tmp_path: Path
) -> None:
    path = write_csv(tmp_path / "t.csv", [(1, label) for label in labels], "x,y")
    data = load(str(path), label="y", test=0)
    assert data.classes == classes
    assert data.y.tolist() == codes


def test_numbers_of_every_parquet_type(tmp_path: Path) -> None:
    from decimal import Decimal

    path = write_parquet(
        tmp_path / "t.parquet",
        a=np.array([1, 2, 3], np.int8),
        b=[True, False, True],
        c=[Decimal("1.5"), Decimal("2.5"), Decimal("3.5")],
        d=np.array([1, 2, 3], np.float16),
        y=[1.0, 0.0, 1.0],
    )
    data = load(str(path), label="y", test=0)
    assert data.x.tolist() == [[1, 1, 1.5, 1], [2, 0, 2.5, 2], [3, 1, 3.5, 3]]
    assert data.classes == ("0", "1")


GOOD = [(1, 2, "a"), (3, 4, "b"), (5, 6, "a")]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([*GOOD, ("x", 8, "a")], r"column 'u', row 4: 'x' is not a number"),
        ([*GOOD, (7, "", "a")], r"column 'v', row 4: the value is missing \(NaN\)"),
        ([*GOOD, (7, "NaN", "a")], r"column 'v', row 4: the value is missing \(NaN\)"),
        ([*GOOD, (7, "inf", "a")], r"column 'v', row 4: inf is not a finite number"),
        ([*GOOD, (7, "1e300", "a")], r"column 'v', row 4: 1e300 is not a finite number"),
        ([*GOOD, (7, 8, "")], r"column 'y', row 4: the value is missing"),
        ([*GOOD, (7, 8)], r"row 4 has 2 cells, and the header has 3"),
        ([(1, 2, 0), (1, 2, 1), (1, 2, 0.5)], r"column 'y', row 3: label 0\.5 is not a whole number"),
        ([(1, 2, "a"), (1, 2, "b"), (1, 2, "c")], r"column 'y' has a different label in every row"),
        ([(1, 2, "a"), (1, 2, "a")], "at least 2 classes"),
        ([], "has a header and no rows"),
    ],
)
def test_faults_of_a_csv_name_file_column_and_row(rows: list[Any], sentence: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "mine.csv", rows, "u,v,y")
    with pytest.raises(DataError, match=sentence) as error:
        load(str(path), label="y")
    assert "mine.csv" in str(error.value)


def test_rows_are_counted_across_blocks(tmp_path: Path) -> None:
    rows = [(i, i % 2) for i in range(20000)] + [("oops", 1)]
    with pytest.raises(DataError, match="column 'x', row 20001: 'oops'"):
        load(str(write_csv(tmp_path / "t.csv", rows, "x,y")), label="y")
    assert len(load(str(write_csv(tmp_path / "t.csv", rows[:-1], "x,y")), label="y", test=0).y) == 20000


def test_a_fault_in_the_test_file_names_the_test_file(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [(1, 0), (1, 1), (1, 0)], "x,y")
    write_csv(tmp_path / "b.csv", [(1, 0), (1, 1.5)], "x,y")
    with pytest.raises(DataError, match=r"b\.csv: column 'y', row 2: label 1\.5"):
        load("a.csv", tmp_path, label="y", test="b.csv")


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        ([1.0, None, 3.0], r"column 'u', row 2: the value is missing"),
        ([1.0, float("nan"), 3.0], r"column 'u', row 2: the value is missing"),
        (["a", "b", "c"], r"column 'u', row 1: 'a' is not a number"),
        ([[1], [2], [3]], r"column 'u', row 1: '\[1\]' is not a number"),
    ],
)
def test_faults_of_a_parquet_name_column_and_row(column: list[Any], sentence: str, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", u=column, y=[0, 1, 0])
    with pytest.raises(DataError, match=sentence):
        load(str(path), label="y")
    path = write_parquet(tmp_path / "t.parquet", u=[1, 2, 3], y=["a", None, "b"])
    with pytest.raises(DataError, match="column 'y', row 2: the value is missing"):
        load(str(path), label="y")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, 'needs the name of its label column, for example label = "class"'),
        ({"label": "diagnos"}, "has no column 'diagnos': did you mean 'diagnosis'"),
        ({"label": "diagnosis", "client": "site"}, "has no column 'site'"),
        ({"label": "diagnosis", "drop": "age"}, "drop must be a list of column names, not 'age'"),
        ({"label": "diagnosis", "drop": ["agee"]}, "did you mean 'age'"),
        ({"label": "diagnosis", "client": "hospital", "test": 1.5}, r"test must be a number .* not 1\.5"),
        ({"label": "diagnosis", "client": "hospital", "seed": -1}, "seed must be a whole number"),
        ({"label": "diagnosis", "delimiter": ";;"}, "delimiter must be a single character"),
        ({"label": "diagnosis", "client": "hospital", "normalise": "mnist"}, "use 'pool' or 'none'"),
    ],
)
def test_wrong_options(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv")
    with pytest.raises(ConfigError, match=sentence):
        load(str(path), **options)


def test_broken_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csv, parquet = tmp_path / "a.csv", write_parquet(tmp_path / "a.parquet")
    for content, sentence in (
        (b"", "is empty"),
        (b"x,y\n\xff\xfe\n", "truncated or corrupt"),
        (b'x,y\n"1,2\n', "truncated or corrupt"),
        (b"x,x,y\n1,2,3\n", "two columns called 'x'"),
        (b"y\n1\n", "no feature columns"),
    ):
        csv.write_bytes(content)
        with pytest.raises(DataError, match=sentence) as error:
            load("a.csv", tmp_path, label="y")
        assert str(csv) in str(error.value)
    whole = parquet.read_bytes()
    for broken in (whole[:-20], b"", b"nonsense"):
        parquet.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.parquet is truncated or corrupt"):
            load("a.parquet", tmp_path, label="diagnosis")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r'needs pyarrow: pip install "equipoise\[tables\]"'):
        load("a.parquet", tmp_path, label="diagnosis")


def test_csv_with_byte_order_mark_semicolons_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("\ufeffx; y\r\n 1.5 ;ja\r\n\r\n2;nein\r\n3;ja\r\n".encode())
    data = load("a.csv", tmp_path, label="y", test=0, delimiter=";")
    assert data.x[:, 0].tolist() == [1.5, 2, 3]
    assert data.classes == ("ja", "nein")

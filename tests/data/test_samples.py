"""Samples of one file or folder: tables, arrays and images, with and without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from equipoise.core.errors import DataError, EquipoiseError
from equipoise.data.samples import in_order, positions, read_samples

TABLE = "id,age,marker,state\n7,50,0.5,ill\n8,60,-1,well\n9,70,2,well\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def parquet(path: Path, **columns: list[Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def picture(path: Path, size: tuple[int, int] = (4, 3), colour: tuple[int, int, int] = (255, 0, 0)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def test_a_table_gives_numbers_labels_and_the_names_of_its_columns(tmp_path: Path) -> None:
    samples = read_samples(write(tmp_path / "a.csv", TABLE), label="state", drop=("id",))
    assert samples.columns == ("age", "marker")
    assert samples.x.dtype == np.float32
    assert samples.x.tolist() == [[50, 0.5], [60, -1], [70, 2]]
    assert samples.labels is not None
    assert samples.labels.tolist() == ["ill", "well", "well"]
    assert len(samples) == 3


def test_columns_are_read_by_name_in_the_order_asked_for(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", TABLE)
    assert read_samples(file, columns=("marker", "age")).x.tolist() == [[0.5, 50], [-1, 60], [2, 70]]
    moved = write(tmp_path / "b.csv", "state,marker,note,age\nill,0.5,text,50\n")
    assert read_samples(moved, columns=("age", "marker")).x.tolist() == [[50, 0.5]]
    assert read_samples(moved, columns=("age",)).labels is None


def test_columns_that_are_not_read_may_share_a_name(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "age,x,x\n50,1,2\n")
    assert read_samples(file, columns=("age",)).x.tolist() == [[50]]
    with pytest.raises(DataError, match="two columns called 'x'"):
        read_samples(file, columns=("age", "x"))
    with pytest.raises(DataError, match="two columns called 'x'"):
        read_samples(file)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"label": "stat"}, "has no column 'stat': did you mean 'state'?"),
        ({"label": "state", "columns": ("age", "markr")}, "has no column 'markr': did you mean 'marker'?"),
        ({"label": "state", "drop": ("idd",)}, "has no column 'idd': did you mean 'id'?"),
        ({"label": "age", "columns": ("state",)}, "column 'state', row 1: 'ill' is not a number"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_the_nearest(
    tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(EquipoiseError) as caught:
        read_samples(write(tmp_path / "a.csv", TABLE), **options)
    assert sentence in str(caught.value)


def test_whole_numbers_are_one_class_however_they_are_written(tmp_path: Path) -> None:
    one = read_samples(write(tmp_path / "a.csv", "x,y\n1,1\n2,0\n3,10\n"), label="y")
    other = read_samples(write(tmp_path / "b.csv", "x,y\n1,1.0\n2,0.0\n3,10.0\n"), label="y")
    third = read_samples(parquet(tmp_path / "c.parquet", x=[1.0, 2.0, 3.0], y=[1.0, 0.0, 10.0]), label="y")
    for samples in (one, other, third):
        assert samples.labels is not None
        assert samples.labels.tolist() == ["1", "0", "10"]
    names = read_samples(write(tmp_path / "d.csv", "x,y\n1,1.5\n2,a\n"), label="y")
    assert names.labels is not None
    assert names.labels.tolist() == ["1.5", "a"]
    assert in_order({"10", "0", "1"}) == ("0", "1", "10")


def test_a_missing_label_is_named_by_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'y', row 2: the value is missing"):
        read_samples(write(tmp_path / "a.csv", "x,y\n1,a\n2,\n"), label="y")


def test_parquet_is_read_like_csv(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", state=["ill", "well"], marker=[0.5, -1.0], age=[50, 60])
    samples = read_samples(file, label="state", columns=("age", "marker"))
    assert samples.x.tolist() == [[50, 0.5], [60, -1]]
    assert samples.labels is not None
    assert samples.labels.tolist() == ["ill", "well"]


def test_arrays_have_labels_by_number_or_name(tmp_path: Path) -> None:
    x = np.zeros((3, 2))
    np.savez(tmp_path / "a.npz", x=x, y=[2, 0, 1])
    np.savez(tmp_path / "b.npz", x=x, y=[1, 0, 1], classes=["well", "ill"])
    np.savez(tmp_path / "c.npz", x=x, y=["b", "a", "b"])
    labels = [read_samples(tmp_path / f"{name}.npz").labels for name in "abc"]
    assert [found.tolist() for found in labels if found is not None] == [
        ["2", "0", "1"],
        ["ill", "well", "ill"],
        ["b", "a", "b"],
    ]


def test_arrays_need_no_labels_if_labelled_is_false(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 5, 6), np.uint8))
    samples = read_samples(tmp_path / "a.npz", labelled=False)
    assert samples.x.shape == (2, 1, 5, 6)
    assert samples.labels is None
    with pytest.raises(DataError, match="no array called train_y or y_train or y"):
        read_samples(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x": [[1.0, np.nan], [0, 0]], "y": [0, 1]}, "has nan in row 1, feature 2"),
        ({"x": [[1.0, np.inf]], "y": [0]}, "has inf in row 1, feature 2"),
        ({"x": np.zeros((3, 2)), "y": [0, 1]}, r"has 3 samples but labels of shape \[2\]"),
        ({"x": np.zeros((2, 2)), "y": [0, -1]}, "has label -1 in row 2"),
        ({"x": np.zeros((2, 2)), "y": [0, 2], "classes": ["a", "b"]}, "has label 2 in row 2, outside 0 to 1"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "is empty"),
        ({"x": np.zeros((2, 2, 2, 2, 2)), "y": [0, 1]}, r"must be uint8 or float32 \[N, C, H, W\]"),
        ({"y": [0]}, "no array called"),
    ],
)
def test_arrays_that_no_training_could_use_are_refused(tmp_path: Path, arrays: dict[str, Any], sentence: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=sentence):
        read_samples(tmp_path / "a.npz")
    if "label" not in sentence:
        with pytest.raises(DataError, match=sentence):
            read_samples(tmp_path / "a.npz", labelled=False)


def test_a_folder_of_folders_gives_classes_and_files(tmp_path: Path) -> None:
    for name in ("well/b.png", "ill/a.jpg", "ill/c.PNG"):
        picture(tmp_path / name)
    write(tmp_path / "ill" / "notes.txt", "no image")
    samples = read_samples(tmp_path)
    assert samples.files == ("ill/a.jpg", "ill/c.PNG", "well/b.png")
    assert samples.labels is not None
    assert samples.labels.tolist() == ["ill", "ill", "well"]
    assert samples.x.shape == (3, 3, 3, 4)


def test_a_flat_folder_is_accepted_if_labelled_is_false(tmp_path: Path) -> None:
    picture(tmp_path / "b.png")
    picture(tmp_path / "2024" / "a.png")
    samples = read_samples(tmp_path, labelled=False, grey=True)
    assert samples.files == ("2024/a.png", "b.png")
    assert samples.labels is None
    assert samples.x.shape == (2, 1, 3, 4)
    assert samples.x.max() == 76  # red, converted to grey
    with pytest.raises(DataError, match=r"has no images .* in folders named by class"):
        read_samples(tmp_path / "2024")


def test_images_of_two_sizes_are_named(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png", (8, 8))
    with pytest.raises(DataError, match=r"b\.png is 8 x 8 pixels, and .*a\.png is 4 x 3"):
        read_samples(tmp_path, labelled=False)


def test_the_error_says_why_a_file_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.csv does not exist"):
        read_samples(tmp_path / "nowhere.csv")
    with pytest.raises(DataError, match=r"expected a \.csv, \.parquet or \.npz file, or a folder of images"):
        read_samples(write(tmp_path / "a.txt", "x"))
    with pytest.raises(DataError, match="truncated"):
        read_samples(write(tmp_path / "a.npz", "PK"))
    with pytest.raises(DataError, match="no images"):
        read_samples(tmp_path, labelled=False)
    write(tmp_path / "a.png", "no picture")
    with pytest.raises(DataError, match=r"a\.png is truncated or corrupt"):
        read_samples(tmp_path, labelled=False)


def test_labels_become_class_numbers(tmp_path: Path) -> None:
    assert positions(np.array(["b", "a", "b"]), ("a", "b", "c"), "this run").tolist() == [1, 0, 1]
    with pytest.raises(DataError, match=r"label 'wel' is not among the classes of this run; did you mean 'well'\?"):
        positions(np.array(["well", "wel"]), ("ill", "well"), "this run")

"""Data sources: the tests write small files of every format, whole and broken."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from equipoise.core.errors import ConfigError, DataError
from equipoise.data import Dataset, available, load
from equipoise.data.cifar import CLASSES
from equipoise.data.dataset import normalisation
from equipoise.data.files import data_root
from equipoise.data.holdout import holdout

IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, names: tuple[str, ...] = IDX, gz: bool = False, labels: int = 10, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = []
    for n, seed in ((30, 0), (20, 1)):
        arrays += [pixels(n, 5, 4, seed=seed), (np.arange(n) % labels + first).astype(np.uint8)]
    for name, array in zip(names, arrays, strict=True):
        data = idx_bytes(array)
        (folder / (name + ".gz" * gz)).write_bytes(gzip.compress(data) if gz else data)


# --- the data set itself


def table(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "name": "toy",
        "x": np.zeros((4, 2), np.float32),
        "y": np.array([0, 1, 0, 1]),
        "test_x": None,
        "test_y": None,
        "classes": ("a", "b"),
        "mean": (0.0, 0.0),
        "std": (1.0, 1.0),
    }
    return values | changes


NAN = np.array([[0, 0], [0, 0], [0, np.nan], [0, 0]], np.float32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"y": np.array([0, 1, 2, 1])}, "label 2 in row 3, outside 0 to 1"),
        ({"y": np.array([0, 1, -1, 1])}, "label -1 in row 3"),
        ({"y": np.array([0, 1, 0])}, "4 samples but labels of shape"),
        ({"y": np.array([0, 1, 0, 1], np.int32)}, "int64 labels, not int32"),
        ({"x": NAN}, "nan in row 3, feature 2"),
        ({"x": np.zeros((4, 2))}, "not float64"),
        ({"x": np.zeros((0, 2), np.float32), "y": np.zeros(0, np.int64)}, "training set is empty"),
        ({"classes": ("a",)}, "at least 2 classes"),
        ({"test_x": np.zeros((4, 2), np.float32)}, "needs both"),
        ({"test_x": np.zeros((4, 3), np.float32), "test_y": np.array([0, 1, 0, 1])}, "test samples are"),
        ({"mean": (0.0,)}, "one number"),
        ({"std": (1.0, 0.0)}, "std above 0"),
        ({"client": np.array([0, 0, 1, 1])}, "must be given together"),
        ({"client": np.array([0, 0, 1, 1]), "roster": ("b", "a")}, "sorted order"),
        ({"client": np.array([0, 0, 0, 2]), "roster": ("a", "b")}, "client 2 in row 4, outside 0 to 1"),
        ({"client": np.array([0, 0, 0, 0]), "roster": ("a", "b")}, "client 'b' has no training sample"),
    ],
)
def test_a_dataset_that_no_training_could_use_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        Dataset(**table(**changes))  # type: ignore[arg-type]


def test_normalisation_from_the_pool_matches_numpy() -> None:
    images = pixels(3000, 3, 4, 4)
    mean, std = normalisation("pool", images)
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 2, 3)))
    np.testing.assert_allclose(std, (images / 255).std(axis=(0, 2, 3)))
    features = np.column_stack([np.arange(5000) * 1e3, np.full(5000, 0.1)]).astype(np.float32)
    mean, std = normalisation("pool", features)
    np.testing.assert_allclose(mean, features.astype(np.float64).mean(axis=0))
    assert std[0] == pytest.approx(features[:, 0].astype(np.float64).std())
    assert std[1] == 1.0  # a constant feature


def test_normalisation_by_name() -> None:
    colour = pixels(2, 3, 4, 4)
    assert normalisation("imagenet", colour)[0] == (0.485, 0.456, 0.406)
    assert normalisation("none", colour) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match="did you mean 'imagenet'"):
        normalisation("imagnet", colour)
    with pytest.raises(ConfigError, match="images of 1 channels"):
        normalisation("mnist", colour)


def test_holdout_is_stratified_and_leaves_every_client_a_sample() -> None:
    y = np.repeat([0, 1, 2], [100, 50, 1])
    test = holdout(y, 0.2, seed=3)
    assert np.bincount(y[test], minlength=3).tolist() == [20, 10, 0]
    assert (test == holdout(y, 0.2, seed=3)).all()
    assert (test != holdout(y, 0.2, seed=4)).any()
    owner = np.arange(151) // 2  # 76 clients, the last of one sample
    left = owner[~holdout(y, 0.5, seed=0, client=owner)]
    assert np.unique(left).size == 76


# --- where files are looked for


def test_data_dir_then_variable_then_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    assert data_root() == Path("data")
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root("elsewhere") == Path("elsewhere")


def test_unknown_source_and_option_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        load("mnits", tmp_path)
    with pytest.raises(ConfigError, match="no option 'normalize': did you mean 'normalise'"):
        load("digits", tmp_path, normalize="none")


@pytest.mark.parametrize(
    "source", ["mnist", "fashion_mnist", "emnist", "cifar10", "cifar100", "cinic10", "tiny_imagenet"]
)
def test_a_missing_data_set_says_what_where_and_how(source: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load(source, tmp_path)
    for words in (source, str(tmp_path), "EQUIPOISE_DATA", "--data-dir"):
        assert words in str(error.value)


def test_available_tells_what_is_found(tmp_path: Path) -> None:
    assert {row.name for row in available(tmp_path) if row.found} >= {"digits", "FILE.csv"}
    assert not any(row.found for row in available(tmp_path) if row.name in ("mnist", "emnist", "cifar10"))
    write_idx(tmp_path / "MNIST" / "raw")
    write_idx(tmp_path, tuple(f"emnist-letters-{name.replace('t10k', 'test')}" for name in IDX))
    assert {row.name for row in available(tmp_path) if row.found} >= {"mnist", "emnist"}


# --- digits, MNIST and its relatives


def test_digits() -> None:
    data = load("digits")
    assert data.x.shape == (1438, 1, 8, 8)
    assert data.test_x is not None
    assert data.test_y is not None
    assert len(data.test_x) == 359
    assert data.x.dtype == np.uint8
    assert data.x.max() == 255
    assert data.mean[0] == pytest.approx((data.x / 255).mean())
    share = np.bincount(data.test_y) / (data.counts + np.bincount(data.test_y))
    assert np.abs(share - 0.2).max() < 0.005
    assert (load("digits").test_x == data.test_x).all()


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("folder", ["", "MNIST/raw", "mnist"])
def test_mnist_as_idx(folder: str, gz: bool, tmp_path: Path) -> None:
    write_idx(tmp_path / folder, gz=gz)
    data = load("mnist", tmp_path)
    assert (data.x == pixels(30, 5, 4)[:, None]).all()
    assert data.y.tolist() == [i % 10 for i in range(30)]
    assert data.test_x is not None
    assert data.test_x.shape == (20, 1, 5, 4)
    assert data.x.flags.writeable  # torch warns about read-only arrays
    assert (data.mean, data.std) == ((0.1307,), (0.3081,))


def test_mnist_and_fashion_mnist_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    write_idx(tmp_path / "both")
    with pytest.raises(DataError, match="fashion_mnist: found no"):
        load("fashion_mnist", tmp_path / "both")
    write_idx(tmp_path / "fashion")
    with pytest.raises(DataError, match="mnist: found no"):
        load("mnist", tmp_path / "fashion")
    for root in (tmp_path, tmp_path / "fashion"):
        assert load("fashion_mnist", root).classes[9] == "ankle boot"


@pytest.mark.parametrize(
    "keys", [("train_x", "train_y", "test_x", "test_y"), ("x_train", "y_train", "x_test", "y_test")]
)
def test_mnist_as_npz(keys: tuple[str, ...], tmp_path: Path) -> None:
    arrays = (pixels(30, 5, 4), np.arange(30, dtype=np.uint8) % 10, pixels(20, 5, 4), np.arange(20) % 10)
    np.savez_compressed(tmp_path / "mnist.npz", **dict(zip(keys, arrays, strict=True)))
    data = load("mnist", tmp_path, normalise="none")
    assert (data.x[:, 0] == arrays[0]).all()
    assert data.y.dtype == np.int64
    assert data.mean == (0.0,)


def test_broken_idx_files_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path)
    images = tmp_path / IDX[0]
    whole = images.read_bytes()
    for broken, sentence in (
        (whole[:-1], r"30 x 5 x 4 needs 616 bytes, and the file has 615"),
        (whole + b"x", "truncated or corrupt"),
        (whole[:10], "truncated or corrupt"),
        (b"", "not an idx file"),
        (b"PK\x03\x04", "not an idx file of bytes: it begins with 50 4b 03 04"),
        (idx_bytes(pixels(29, 5, 4)), r"\[29, 5, 4\], and its label file has shape \[30\]"),
    ):
        images.write_bytes(broken)
        with pytest.raises(DataError, match=sentence) as error:
            load("mnist", tmp_path)
        assert str(images) in str(error.value)


def test_broken_gz_files_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path, gz=True)
    images = tmp_path / f"{IDX[0]}.gz"
    whole = images.read_bytes()
    for broken in (whole[: len(whole) // 2], b"no gzip at all", whole[:30] + b"\xff" * 40 + whole[70:]):
        images.write_bytes(broken)
        with pytest.raises(DataError, match="truncated or corrupt") as error:
            load("mnist", tmp_path)
        assert str(images) in str(error.value)


@pytest.mark.parametrize(("split", "labels", "first"), [("balanced", 47, 0), ("letters", 26, 1), ("digits", 10, 0)])
def test_emnist_idx_is_turned_upright(split: str, labels: int, first: int, tmp_path: Path) -> None:
    names = tuple(f"emnist-{split}-{name.replace('t10k', 'test')}" for name in IDX)
    write_idx(tmp_path / "EMNIST" / "raw", names, gz=True, labels=labels, first=first)
    data = load("emnist", tmp_path, split=split)
    assert (data.x[:, 0] == pixels(30, 5, 4).transpose(0, 2, 1)).all()
    assert data.num_classes == labels
    assert data.y[:5].tolist() == [0, 1, 2, 3, 4]


def test_emnist_byclass_merges_look_alikes(tmp_path: Path) -> None:
    y = np.arange(62, dtype=np.uint8)
    np.savez(
        tmp_path / "emnist_byclass_small.npz",
        train_x=pixels(62, 4, 4),
        train_y=y,
        test_x=pixels(62, 4, 4),
        test_y=y,
    )
    assert load("emnist", tmp_path).classes[36] == "a"
    merged = load("emnist", tmp_path, classes=47)
    names = [merged.classes[c] for c in merged.y]
    assert names[10:36] == list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert names[36:] == list("abCdefghIJKLMnOPqrStUVWXYZ")
    assert len(merged.classes) == 47
    with pytest.raises(ConfigError, match="classes is 26, expected 62 for the split 'byclass'"):
        load("emnist", tmp_path, classes=26)
    with pytest.raises(ConfigError, match="did you mean 'balanced'"):
        load("emnist", tmp_path, split="balance")


# --- CIFAR


def python2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """Return a batch as Python 2 wrote it, with every string as bytes."""
    raw = data.tobytes()
    return b"".join(
        [
            b"(dS'data'\ncnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR",
            b"(I1\n(I%d\nI%d\ntcnumpy\ndtype\n(S'u1'\nI0\nI1\ntR" % data.shape,
            b"(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\nT" + struct.pack("<I", len(raw)) + raw + b"tbs",
            b"S'labels'\n(l" + b"".join(b"I%d\na" % label for label in labels) + b"s.",
        ]
    )


def write_cifar(root: Path, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Write six batches of six images in one of the forms; return all images and labels."""
    from PIL import Image

    x, y = pixels(36, 3, 32, 32), np.arange(36) % 10
    folder = root / {"python2": "cifar-10-batches-py", "python3": "cifar10/cifar-10-batches-py"}.get(form, "cifar10")
    folder.mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{b}" for b in range(1, 6)), "test_batch"]):
        images, labels = x[6 * i : 6 * i + 6], y[6 * i : 6 * i + 6]
        flat = images.reshape(6, -1)
        if form == "python2":
            (folder / name).write_bytes(python2_pickle(flat, labels.tolist()))
        elif form == "python3":
            (folder / name).write_bytes(pickle.dumps({b"data": flat, b"labels": labels.tolist()}, protocol=2))
        elif form == "binary":
            (folder / f"{name}.bin").write_bytes(np.column_stack([labels.astype(np.uint8), flat]).tobytes())
        else:
            sheet = images.reshape(2, 3, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(64, 96, 3)
            Image.fromarray(np.ascontiguousarray(sheet)).save(folder / f"{name}.webp", lossless=True)
    if form == "sheets":
        np.save(folder / "labels.npy", y.astype(np.uint8))
    return x, y


@pytest.mark.parametrize("form", ["python2", "python3", "binary", "sheets"])
def test_cifar10_in_every_form(form: str, tmp_path: Path) -> None:
    x, y = write_cifar(tmp_path, form)
    data = load("cifar10", tmp_path, normalise="imagenet")
    assert (data.x == x[:30]).all()
    assert (data.y == y[:30]).all()
    assert data.test_x is not None
    assert (data.test_x == x[30:]).all()
    assert data.x.flags.writeable
    assert data.test_x.flags.writeable
    assert data.mean == (0.485, 0.456, 0.406)
    assert load("cifar10", tmp_path).mean == (0.4914, 0.4822, 0.4465)


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("echo harm",)


@pytest.mark.parametrize(
    ("form", "name", "content", "sentence"),
    [
        ("python2", "data_batch_2", pickle.dumps(Exploit()), "is code and not data"),
        ("python2", "data_batch_2", pickle.dumps({b"labels": [1]}), "data"),
        ("python2", "data_batch_2", pickle.dumps([1, 2]), "truncated or corrupt"),
        ("python2", "data_batch_2", pickle.dumps({b"data": [[1]], b"labels": [1]}), "not a CIFAR batch"),
        ("python2", "test_batch", b"", "truncated or corrupt"),
        ("binary", "data_batch_3.bin", b"x" * 3072, "3072 bytes are not a multiple of 3073"),
        ("binary", "data_batch_3.bin", b"", "not a multiple"),
        ("sheets", "data_batch_4.webp", b"RIFF", "truncated or corrupt"),
        ("sheets", "labels.npy", b"\x93NUMPY", "truncated or corrupt"),
    ],
)
def test_broken_and_hostile_batches_are_named(
    form: str, name: str, content: bytes, sentence: str, tmp_path: Path
) -> None:
    write_cifar(tmp_path, form)
    (path,) = tmp_path.rglob(name)
    path.write_bytes(content)
    with pytest.raises(DataError, match=sentence) as error:
        load("cifar10", tmp_path)
    assert str(path) in str(error.value)


def test_truncated_sheets_and_short_labels(tmp_path: Path) -> None:
    write_cifar(tmp_path, "sheets")
    np.save(tmp_path / "cifar10" / "labels.npy", np.zeros(35, np.uint8))
    with pytest.raises(DataError, match=r"labels of shape \[35\] for 36 images"):
        load("cifar10", tmp_path)
    sheet = tmp_path / "cifar10" / "test_batch.webp"
    sheet.write_bytes(sheet.read_bytes()[:-500])
    with pytest.raises(DataError, match=r"test_batch\.webp is truncated or corrupt"):
        load("cifar10", tmp_path)


def test_cifar100(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, n in (("train", 6), ("test", 4)):
        batch = {b"data": pixels(n, 3072), b"fine_labels": list(range(n)), b"coarse_labels": [0] * n}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"c%d" % i for i in range(100)]}))
    data = load("cifar100", tmp_path)
    assert data.num_classes == 100
    assert data.classes[99] == "c99"
    assert data.x.shape == (6, 3, 32, 32)


# --- folders of images


def write_images(folder: Path, n: int, size: int, suffix: str, mode: str = "RGB") -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    for i in range(n):
        shape = (size, size, 3) if mode == "RGB" else (size, size)
        Image.fromarray(np.full(shape, 10 * (i + 1), np.uint8)).save(folder / f"{i}{suffix}")


def test_cinic10(tmp_path: Path) -> None:
    for part, n in (("train", 2), ("valid", 1), ("test", 1)):
        for c in CLASSES:
            write_images(tmp_path / "CINIC-10" / part / c, n, 8, ".png", "L" if c == "dog" else "RGB")
    data = load("cinic10", tmp_path)
    assert data.x.shape == (20, 3, 8, 8)
    assert data.counts.tolist() == [2] * 10
    assert data.x[1].max() == data.x[1].min() == 20
    assert load("cinic10", tmp_path, merge_valid=True).counts.tolist() == [3] * 10
    with pytest.raises(ConfigError, match="merge_valid must be true or false"):
        load("cinic10", tmp_path, merge_valid="yes")
    bad = tmp_path / "CINIC-10" / "test" / "ship" / "0.png"
    whole = bad.read_bytes()
    bad.write_bytes(whole[:40])
    with pytest.raises(DataError, match=f"{bad} is truncated or corrupt"):
        load("cinic10", tmp_path)
    bad.unlink()
    with pytest.raises(DataError, match=r"ship has no \*\.png"):
        load("cinic10", tmp_path)


def test_tiny_imagenet(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    for wnid in ("n02", "n01"):
        write_images(root / "train" / wnid / "images", 2, 8, ".JPEG")
    write_images(root / "val" / "images", 3, 8, ".JPEG")
    notes = root / "val" / "val_annotations.txt"
    notes.write_text("0.JPEG\tn02\t0\t0\t1\t1\n2.JPEG\tn01\t0\t0\t1\t1\n")
    data = load("tiny_imagenet", tmp_path)
    assert data.classes == ("n01", "n02")
    assert data.y.tolist() == [0, 0, 1, 1]
    assert data.test_y is not None
    assert data.test_x is not None
    assert data.test_y.tolist() == [1, 0]
    assert abs(int(data.test_x[1].mean()) - 30) < 3
    notes.write_text("0.JPEG\tn03\n")
    with pytest.raises(DataError, match="line 1"):
        load("tiny_imagenet", tmp_path)
    write_images(root / "odd", 1, 9, ".JPEG")
    (root / "odd" / "0.JPEG").rename(root / "val" / "images" / "9.JPEG")
    notes.write_text("0.JPEG\tn01\n9.JPEG\tn02\n")
    with pytest.raises(DataError, match=r"9\.JPEG is 9 x 9 pixels"):
        load("tiny_imagenet", tmp_path)


# --- any npz


def test_npz_with_clients_and_a_held_out_part(tmp_path: Path) -> None:
    owner = np.array(["site b", "site a"])[np.arange(40) % 2]
    np.savez(tmp_path / "mine.npz", x=np.arange(80.0).reshape(40, 2), y=np.arange(40) % 4, client=owner)
    data = load(str(tmp_path / "mine.npz"))
    assert data.name == "mine.npz"
    assert data.x.dtype == np.float32
    assert data.test_y is not None
    assert np.bincount(data.test_y).tolist() == [2, 2, 2, 2]
    assert data.roster == ("site a", "site b")
    assert data.client is not None
    assert (data.client == (data.x[:, 0] % 4 == 0)).all()  # even rows belong to site b
    assert load("mine.npz", tmp_path, test=0).test_x is None
    assert (load("mine.npz", tmp_path, seed=1).x != data.x).any()


def test_npz_of_images_and_named_labels(tmp_path: Path) -> None:
    x, names = pixels(6, 4, 5, 3), np.array(["cat", "dog", "ant"] * 2)
    np.savez(tmp_path / "a.npz", x=x, y=names, test_x=x[:3], test_y=names[:3])
    data = load("a.npz", tmp_path)
    assert (data.x == x.transpose(0, 3, 1, 2)).all()
    assert data.classes == ("ant", "cat", "dog")
    assert data.y.tolist() == [1, 2, 0, 1, 2, 0]


ROWS = np.zeros((4, 2))


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x": ROWS}, "no array called train_y or y_train or y"),
        ({"x": ROWS, "y": [0, 1, 0, 1.5]}, r"label 1\.5 in row 4 is not a whole number"),
        ({"x": ROWS, "y": [0, 1, 0, np.nan]}, "label nan in row 4"),
        ({"x": ROWS, "y": [0, 1, -1, 1]}, "label -1 in row 3"),
        (
            {"x": ROWS, "y": [0, 1, 2, 1], "classes": ["a", "b"]},
            "label 2 in row 3, outside 0 to 1",
        ),
        ({"x": ROWS, "y": ["a", "b", "c", "a"], "classes": ["a", "b"]}, "label 'c' in row 3"),
        ({"x": ROWS, "y": [0, 1, 0, 10**12]}, "more classes than samples"),
        ({"x": ROWS, "y": [0, 1, 0]}, "different lengths"),
        ({"x": np.full((4, 2), np.inf), "y": [0, 1, 0, 1]}, "inf in row 1, feature 1"),
        ({"x": np.full((4, 2), "a"), "y": [0, 1, 0, 1]}, "samples must be numbers"),
        ({"x": np.zeros(4), "y": [0, 1, 0, 1]}, "two dimensions or more"),
        ({"x": ROWS, "y": [["a", "b"]] * 4}, "labels must be whole numbers"),
        ({"x": ROWS, "y": 1}, "labels must be whole numbers"),
        ({"x": np.zeros((4, 2, 2, 2, 2)), "y": [0, 1, 0, 1]}, "must be uint8 or float32"),
        ({"x": ROWS, "y": [0, 1, 0, 1], "test_x": ROWS}, "only one of test_x and test_y"),
        ({"x": ROWS, "y": [0, 1, 0, 1], "client": [0.5] * 4}, "clients must be"),
        (
            {"x": ROWS, "y": [0, 1, 0, 1], "client": [0] * 4, "roster": ["a", "b"]},
            "client 'b' has no",
        ),
        ({"x": np.array([{}, 1, 2, 3], dtype=object), "y": [0, 1, 0, 1]}, "truncated or corrupt"),
    ],
)
def test_faults_of_an_npz_are_named(arrays: dict[str, object], sentence: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{name: np.asarray(values) for name, values in arrays.items()})
    with pytest.raises(DataError, match=sentence) as error:
        load("a.npz", tmp_path)
    assert str(error.value).startswith((str(tmp_path / "a.npz"), "a.npz: "))


def test_broken_and_missing_npz(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random((99, 2)), y=np.arange(99) % 2)
    whole = path.read_bytes()
    for broken in (whole[:-30], b"", b"no zip", whole[:200] + b"\0" * 200 + whole[400:]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="truncated") as error:
            load("a.npz", tmp_path)
        assert str(path) in str(error.value)
    with pytest.raises(DataError, match=r"b\.npz does not exist, neither in"):
        load("b.npz", tmp_path)
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match=r"test must be a number .* not 2"):
        load("a.npz", tmp_path, test=2)


# --- the hub, and libraries that are not installed


class Split(dict[str, list[object]]):
    @property
    def features(self) -> dict[str, object]:
        kinds = {
            "image": type("Image", (), {})(),
            "label": type("ClassLabel", (), {"names": ["no", "yes"]})(),
        }
        return {name: kinds.get(name, type("Value", (), {})()) for name in self}


def fake_hub(monkeypatch: pytest.MonkeyPatch, **splits: Split) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = lambda name, config: splits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def hub_split(n: int) -> Split:
    from PIL import Image

    images = [Image.fromarray(np.full((4, 4), i, np.uint8)) for i in range(n)]
    return Split(image=images, label=[i % 2 for i in range(n)], writer=[f"w{i % 3}" for i in range(n)])


def test_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, train=hub_split(20), test=hub_split(4))
    data = load("hub:owner/name", client="writer")
    assert data.x.shape == (20, 1, 4, 4)
    assert data.x[7].max() == 7
    assert data.classes == ("no", "yes")
    assert data.roster == ("w0", "w1", "w2")
    assert data.test_y is not None
    assert len(data.test_y) == 4
    held = load("hub:owner/name", test=0.5)
    assert (len(held.y), held.test_y is not None and len(held.test_y)) == (10, 10)
    named = load("hub:owner/name", label="writer")
    assert named.classes == ("w0", "w1", "w2")
    with pytest.raises(ConfigError, match="no label column 'lable': did you mean 'label'"):
        load("hub:owner/name", label="lable")
    with pytest.raises(ConfigError, match="no test split 'tset'"):
        load("hub:owner/name", test="tset")
    fake_hub(monkeypatch, train=Split(pixels=[1], label=[0]))
    with pytest.raises(ConfigError, match="0 columns that may be the image: choose one"):
        load("hub:owner/name")


def test_hub_failure_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, config: str | None) -> None:
        raise ConnectionError("no\nnetwork")

    module = types.ModuleType("datasets")
    module.load_dataset = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(DataError, match="hub:a/b cannot be loaded: no network"):
        load("hub:a/b")


def test_a_library_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_cifar(tmp_path, "sheets")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r'needs PIL: pip install "equipoise\[images\]"'):
        load("cifar10", tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r'pip install "equipoise\[hub\]"'):
        load("hub:a/b")


# --- the real files

real = pytest.mark.skipif("EQUIPOISE_DATA" not in os.environ, reason="EQUIPOISE_DATA is not set")


@real
@pytest.mark.data
@pytest.mark.parametrize(
    ("source", "options", "train", "test", "smallest", "largest"),
    [
        ("mnist", {}, 60000, 10000, 5421, 6742),
        ("cifar10", {}, 50000, 10000, 5000, 5000),
        ("emnist", {}, 96962, 19361, 265, 5275),
        ("emnist", {"classes": 47}, 96962, 19361, 334, 5275),
    ],
)
def test_real_files(source: str, options: dict[str, int], train: int, test: int, smallest: int, largest: int) -> None:
    if not next(row.found for row in available() if row.name == source):
        pytest.skip(f"{source} is not in EQUIPOISE_DATA")
    data = load(source, **options)
    assert data.test_y is not None
    assert (len(data.y), len(data.test_y)) == (train, test)
    assert (data.counts.min(), data.counts.max()) == (smallest, largest)
    np.testing.assert_allclose(data.mean, normalisation("pool", data.x[:20000])[0], atol=0.01)


@real
@pytest.mark.data
def test_merged_classes_agree_with_the_map_in_the_file() -> None:
    path = data_root() / "emnist_byclass_116k.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with np.load(path) as file:
        assert (load("emnist", classes=47).y == file["to_bymerge47"][file["train_y"]]).all()

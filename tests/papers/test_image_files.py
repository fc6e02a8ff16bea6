"""The IDX and CIFAR readers: what was written comes back, and each kind of damage has its own sentence."""

from __future__ import annotations

import gzip
import os
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from image_writers import idx_bytes, python2_cifar, write_cifar, write_idx

from hessiankit.support.errors import InputError
from papers.experiments.images import read_cifar, read_idx

RNG = np.random.default_rng(1)
IMAGES = RNG.integers(0, 256, (3, 5, 4), dtype=np.uint8)
PIXELS = RNG.integers(0, 256, (2, 3072), dtype=np.uint8)


@pytest.mark.parametrize("name", ["images", "images.gz"])
def test_idx_round_trip(tmp_path: Path, name: str) -> None:
    assert np.array_equal(read_idx(write_idx(tmp_path / name, IMAGES), 3), IMAGES)


WHOLE = idx_bytes(IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (b"\x01" + WHOLE[1:], "expected two zero bytes"),
        (WHOLE[:2] + b"\x0d" + WHOLE[3:], "type 0x0d with 3 axes, expected unsigned bytes"),
        (idx_bytes(IMAGES[0]), "with 2 axes, expected unsigned bytes (0x08) with 3"),
        (WHOLE[:9], "truncated in its header"),
        (WHOLE[:-1], "promises 60 bytes for shape (3, 5, 4), seen only 59"),
        (WHOLE + b"\0", "promises 60 bytes for shape (3, 5, 4), seen more"),
        (WHOLE[:4] + struct.pack(">3I", *3 * [2**32 - 1]) + WHOLE[16:], "seen only 60"),
        (gzip.compress(WHOLE, mtime=0)[:-20], "damaged gzip data"),
        (gzip.compress(WHOLE, mtime=0)[:-8] + bytes(8), "damaged gzip data"),
        (gzip.compress(WHOLE[:-1], mtime=0), "seen only 59"),
        (b"\x1f\x8bnot gzip at all", "damaged gzip data"),
    ],
)
def test_damaged_idx(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match=re.escape(message)):
        read_idx(tmp_path / "file", 3)


def test_missing_files(tmp_path: Path) -> None:
    for read in (lambda path: read_idx(path, 3), read_cifar):
        with pytest.raises(InputError, match="cannot be read"):
            read(tmp_path / "absent")
        with pytest.raises(InputError, match="cannot be read"):
            read(tmp_path)


@pytest.mark.parametrize("protocol", [0, 2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_cifar_round_trip(tmp_path: Path, protocol: int, order: str) -> None:
    pixels = np.array(PIXELS, order=order)  # type: ignore[call-overload]
    images, labels, n_classes = read_cifar(write_cifar(tmp_path / "train", pixels, [99, 0], "fine_labels", protocol))
    assert np.array_equal(images.transpose(0, 3, 1, 2).reshape(2, 3072), PIXELS)
    assert (labels.tolist(), n_classes) == ([99, 0], 100)


def test_cifar_as_python_2_wrote_it(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(python2_cifar(PIXELS, [3, 98]))
    assert pickle.loads(python2_cifar(PIXELS, [3, 98]), encoding="bytes")[b"data"].tolist() == PIXELS.tolist()
    images, labels, _ = read_cifar(tmp_path / "train")
    assert np.array_equal(images.transpose(0, 3, 1, 2).reshape(2, 3072), PIXELS)
    assert labels.tolist() == [3, 98]


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train").write_bytes(pickle.dumps({b"data": Bomb(), b"fine_labels": [0]}, protocol=protocol))
    with pytest.raises(InputError, match=r"asks for (posix|nt)\.mkdir.*could run code"):
        read_cifar(Path("train"))
    assert not Path("exploded").exists()


@pytest.mark.parametrize(
    "content",
    [np.array([0, None], dtype=object), np.float64(1.0), np.zeros(2, dtype=[("a", "u1")]), complex, np.frombuffer, np.ndarray],
)
def test_numpy_itself_is_never_called(tmp_path: Path, content: object) -> None:
    (tmp_path / "train").write_bytes(pickle.dumps({b"data": content, b"labels": [0]}, protocol=2))
    with pytest.raises(InputError):
        read_cifar(tmp_path / "train")


PICKLE = pickle.dumps({b"data": PIXELS, b"labels": [1, 2]}, protocol=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable pickle (EOFError"),
        (PICKLE[:-300], "not a readable pickle"),
        (b"\x80\x02garbage", "not a readable pickle"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f", "not a readable pickle"),
        (b"\x80\x02K\x01Q.", "refers to objects outside of itself"),
        (pickle.dumps([1]), "holds a list"),
        (pickle.dumps({b"data": 1}), "has keys data, expected 'data' with 'fine_labels'"),
        (pickle.dumps({b"data": 1, b"labels": []}), "'data' is a int"),
        (pickle.dumps({b"data": PIXELS.astype("<f4"), b"labels": []}, protocol=2), "entries of type 'f4'"),
        (pickle.dumps({b"data": PIXELS[:, :-1], b"labels": []}, protocol=2), "shape (2, 3071), expected (N, 3072)"),
        (pickle.dumps({b"data": PIXELS, b"labels": [1]}, protocol=2), "2 images but 1 labels"),
        (pickle.dumps({b"data": PIXELS, b"labels": [1, 10]}, protocol=2), "labels from 1 to 10, expected 0 to 9"),
        (pickle.dumps({b"data": PIXELS, b"labels": [1, "2"]}, protocol=2), "not a list of whole numbers"),
        (PICKLE.replace(b"M\x00\x0c\x86", b"M\x00\x0d\x86"), "claims shape (2, 3328) but holds 6144 bytes"),
    ],
)
def test_damaged_cifar(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "train").write_bytes(content)
    with pytest.raises(InputError, match=re.escape(message)):
        read_cifar(tmp_path / "train")

"""Small image sets from local files (MNIST's IDX, CIFAR's Python pickles) or scikit-learn's digits, cut into patches.

Nothing is downloaded. scikit-learn's digits come with the package; MNIST and CIFAR are read from where they lie.

Files are untrusted input: the sizes of a header are compared with the bytes that follow, and a pickle, which is a program, may
build only dictionaries, lists, numbers, strings and placeholders of NumPy arrays; NumPy itself is never called by it.
"""

from __future__ import annotations

import gzip
import math
import pickle
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from hessiankit.support.errors import InputError, check_name
from hessiankit.support.tables import sizes

GZIP_MAGIC = b"\x1f\x8b"
PICKLE_MAGIC = b"\x80"
IDX_MAGIC = b"\x00\x00"
UNSIGNED_BYTE = 0x08
CIFAR_SHAPE = (3, 32, 32)
CIFAR_LABELS = {"fine_labels": 100, "labels": 10}


def read_idx(path: Path, n_axes: int) -> np.ndarray:
    """Return the unsigned bytes of one IDX file, plain or gzipped, as an array with ``n_axes`` axes.

    The file is two zero bytes, a type code (8: unsigned byte), the number of axes, the axes' lengths as big-endian
    32-bit integers, and the entries with the last axis running fastest.

    Args:
        path: The file; gzip is recognised by its content.
        n_axes: 3 for images ``(N, H, W)``, 1 for labels ``(N,)``.

    Raises:
        InputError: The file is missing, damaged, truncated, too long, or holds something else.
    """
    try:
        with _open(path) as file:
            magic = file.read(4)
            if len(magic) < 4 or magic[:2] != IDX_MAGIC:
                raise InputError(
                    f"load_images: {path}: not an IDX file: it begins with {magic!r}, expected two zero bytes, a type and a rank"
                )
            if magic[2] != UNSIGNED_BYTE or magic[3] != n_axes:
                raise InputError(
                    f"load_images: {path}: IDX type 0x{magic[2]:02x} with {magic[3]} axes, expected unsigned bytes "
                    f"(0x08) with {n_axes}; "
                    f"images have 3 axes and labels 1, so check that the two files are not swapped"
                )
            header = file.read(4 * n_axes)
            if len(header) < 4 * n_axes:
                raise InputError(f"load_images: {path}: truncated in its header; fetch the file again")
            shape = struct.unpack(f">{n_axes}I", header)
            expected = math.prod(shape)
            body = _read(file, expected + 1)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"load_images: {path}: damaged gzip data ({error}); fetch the file again") from error
    except OSError as error:
        raise InputError(f"load_images: {path}: cannot be read ({error.strerror or error})") from error
    if len(body) != expected:
        seen = f"only {len(body)}" if len(body) < expected else "more"
        raise InputError(
            f"load_images: {path}: the header promises {expected} bytes for shape {shape}, seen {seen}; fetch the file again"
        )
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def read_cifar(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Return images ``(N, 32, 32, 3)``, labels ``(N,)`` and the number of classes of one CIFAR pickle.

    A row of ``data`` is 3072 bytes, one 32 x 32 plane for each of red, green, blue. The fine labels of CIFAR-100 are
    read from ``fine_labels``, those of CIFAR-10 from ``labels``.

    Raises:
        InputError: The file is missing, is not a pickle, asks for anything but arrays and plain values, or its content
            is not that of a CIFAR file.
    """
    try:
        with path.open("rb") as file:
            raw = _CifarUnpickler(file, encoding="bytes").load()
    except OSError as error:
        raise InputError(f"load_images: {path}: cannot be read ({error.strerror or error})") from error
    except InputError as error:
        raise InputError(f"load_images: {path}: {error}") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise InputError(
            f"load_images: {path}: not a readable pickle ({type(error).__name__}: {error}); expected the Python "
            f"version of CIFAR, unpacked"
        ) from error
    if not isinstance(raw, dict):
        raise InputError(f"load_images: {path}: holds a {type(raw).__name__}, expected the dictionary of a CIFAR file")
    content = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in raw.items()}
    field = next((key for key in CIFAR_LABELS if key in content), None)
    if "data" not in content or field is None:
        seen = ", ".join(sorted(map(str, content))) or "nothing"
        raise InputError(
            f"load_images: {path}: has keys {seen}, expected 'data' with 'fine_labels' (CIFAR-100) or 'labels' (CIFAR-10)"
        )
    pixels = _array(content["data"], path)
    if pixels.ndim != 2 or pixels.shape[1] != math.prod(CIFAR_SHAPE):
        raise InputError(
            f"load_images: {path}: 'data' has shape {pixels.shape}, expected (N, 3072): a channel-first 32 x 32 image a row"
        )
    labels = _labels(content[field], pixels.shape[0], CIFAR_LABELS[field], path)
    images = pixels.reshape(-1, *CIFAR_SHAPE).transpose(0, 2, 3, 1)  # (N, 32, 32, 3)
    return images, labels, CIFAR_LABELS[field]


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        gzipped = file.read(2) == GZIP_MAGIC
    return cast(IO[bytes], gzip.open(path, "rb")) if gzipped else path.open("rb")


def _read(file: IO[bytes], count: int, chunk: int = 1 << 24) -> bytes:
    """Read up to ``count`` bytes piece by piece: a false header must not decide how much memory is taken."""
    pieces = []
    while count > 0 and (piece := file.read(min(count, chunk))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


class _PickledDType:
    """Stands in for ``numpy.dtype``: keeps its code and ignores the byte order, which a byte has not."""

    def __init__(self, code: object) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        pass


class _PickledArray:
    """Stands in for ``numpy.ndarray``: keeps the state that NumPy would have built the array from."""

    state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """Stand in for ``_codecs.encode``, which Python 3 uses to write bytes in protocol 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise InputError(f"the pickle encodes with {encoding!r}, expected latin1")
    return text.encode("latin1")


STAND_INS: dict[str, Callable[[], Callable[..., Any]]] = {
    "numpy.core.multiarray._reconstruct": lambda: lambda *_: _PickledArray(),
    "numpy._core.multiarray._reconstruct": lambda: lambda *_: _PickledArray(),
    "numpy.ndarray": lambda: lambda *_: _PickledArray(),
    "numpy.dtype": lambda: lambda code, *_: _PickledDType(code),
    "_codecs.encode": lambda: lambda *arguments: _encode(*arguments),
}
"""The few globals that a CIFAR file names, and what makes a fresh stand-in, which the pickle may write into."""


class _CifarUnpickler(pickle.Unpickler):
    """An unpickler that can build dictionaries, lists, numbers, strings and the stand-ins of this file."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in STAND_INS:
            raise InputError(
                f"the pickle asks for {module}.{name}, which no CIFAR file needs and which could run code; "
                f"nothing was executed: fetch the file from a source you trust"
            )
        return STAND_INS[f"{module}.{name}"]()

    def persistent_load(self, pid: Any) -> Any:
        raise InputError("the pickle refers to objects outside of itself, which no CIFAR file does")


def _array(value: object, path: Path) -> np.ndarray:
    """Return the unsigned bytes that a stand-in holds, after checking them against their shape."""
    state = getattr(value, "state", None)
    if not isinstance(value, _PickledArray) or not isinstance(state, tuple) or len(state) != 5:
        raise InputError(f"load_images: {path}: 'data' is a {type(value).__name__}, expected an array of unsigned bytes")
    _, shape, dtype, fortran, raw = state
    code = dtype.code if isinstance(dtype, _PickledDType) else dtype
    if code not in ("u1", "|u1", "uint8") or not isinstance(raw, bytes):
        raise InputError(f"load_images: {path}: 'data' has entries of type {code!r}, expected unsigned bytes ('u1')")
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape) or math.prod(shape) != len(raw):
        raise InputError(f"load_images: {path}: 'data' claims shape {shape} but holds {len(raw)} bytes; fetch the file again")
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def _labels(value: object, count: int, n_classes: int, path: Path) -> np.ndarray:
    if isinstance(value, _PickledArray):
        value = _array(value, path).tolist()
    if not isinstance(value, list) or not all(type(label) is int for label in value):
        raise InputError(f"load_images: {path}: the labels are not a list of whole numbers; fetch the file again")
    if len(value) != count:
        raise InputError(f"load_images: {path}: {count} images but {len(value)} labels; fetch the file again")
    labels = np.array(value, dtype=np.int64)
    if count and not (labels.min() >= 0 and labels.max() < n_classes):
        raise InputError(f"load_images: {path}: labels from {labels.min()} to {labels.max()}, expected 0 to {n_classes - 1}")
    return labels


SPLITS = ("train", "test")
DIGITS_TEST = 360
"""Held-out images of the digits; 1437 of the 1797 are left for training."""

_IDX_PREFIX = {"train": "train", "test": "t10k"}
_CIFAR_FOLDERS = ("cifar-100-python", "cifar-10-batches-py")


@dataclass(frozen=True, eq=False, repr=False)
class ImageDataset:
    """Images in [0, 1] with their labels.

    Attributes:
        images: ``(N, H, W)``, or ``(N, H, W, C)`` in colour.
        labels: ``(N,)`` of whole numbers below ``n_classes``.
        n_classes: Number of classes; for IDX files, which do not say, the largest label + 1.
        name: Where the images come from.
    """

    images: Tensor
    labels: Tensor
    n_classes: int
    name: str

    def __len__(self) -> int:
        return self.images.shape[0]

    def __repr__(self) -> str:
        size = sizes(self.images.shape[1:])
        return f"ImageDataset({self.name}: {len(self)} images {size}, {self.n_classes} classes)"

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.images.shape[1], self.images.shape[2]

    def first(self, count: int) -> ImageDataset:
        """Return the first ``count`` images, for instance as one batch."""
        if not 0 < count <= len(self):
            raise InputError(f"ImageDataset.first: asked for {count} images, {self.name} has {len(self)}; ask for fewer")
        return ImageDataset(self.images[:count], self.labels[:count], self.n_classes, self.name)


def load_images(
    source: str | Path = "digits", *, split: str = "train", seed: int = 0, dtype: torch.dtype = torch.float32
) -> ImageDataset:
    """Return one split of an image set.

    Args:
        source: ``"digits"`` (1797 images of 8 x 8 pixels, scikit-learn), or a path: a folder with MNIST's IDX files
            (``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-...``; plain or ``.gz``), one IDX image
            file with its label file beside it, or the folder or one file of the Python version of CIFAR-10 or CIFAR-100.
        split: ``"train"`` or ``"test"``.
        seed: Draws the stratified 1437/360 split of the digits; the other sets have their own split.
        dtype: Floating type of the images.

    Raises:
        InputError: The source or the split is unknown, or a file is missing or damaged.

    >>> load_images("digits", split="test")
    ImageDataset(digits test: 360 images 8 x 8, 10 classes)
    """
    check_name("load_images", "split", split, SPLITS)
    if source == "digits":
        return _digits(split, seed, dtype)
    path = Path(source).expanduser()
    if not path.exists():
        raise InputError(
            f"load_images: {str(source)!r} is neither 'digits' nor an existing path; nothing is downloaded, so give the folder "
            f"that holds MNIST's IDX files or the Python version of CIFAR"
        )
    if path.is_file():
        _check_split_of_file(path, split)
    loaded = _load_file(path) if path.is_file() else _load_folder(path, split)
    if not loaded.labels.size:
        raise InputError(f"load_images: {path} holds no images")
    images = torch.from_numpy(np.array(loaded.images, order="C")).to(dtype) / 255
    labels = torch.from_numpy(loaded.labels.astype(np.int64))
    return ImageDataset(images, labels, loaded.n_classes, f"{loaded.name} {split}")


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut images into square patches, left to right and then downwards.

    Args:
        images: ``(N, H, W)`` or ``(N, H, W, C)``.
        patch: Side of a patch; it has to divide H and W.

    Returns:
        ``(N, L, patch * patch * C)`` with ``L = (H / patch) (W / patch)``; the entries of a patch run along its rows,
        channels fastest.

    Raises:
        InputError: Wrong number of axes, or patches that do not tile the image.

    >>> patchify(torch.arange(16).reshape(1, 4, 4), 2)[0, 1].tolist()
    [2, 3, 6, 7]
    """
    if images.dim() not in (3, 4):
        raise InputError(f"patchify: images have shape {tuple(images.shape)}, expected (N, H, W) or (N, H, W, C)")
    n, height, width = images.shape[:3]
    if patch < 1 or height % patch or width % patch:
        sides = ", ".join(str(p) for p in _sides(height, width))
        raise InputError(f"patchify: patches of side {patch} do not tile {height} x {width} images; choose one of {sides}")
    grid = images.reshape(n, height // patch, patch, width // patch, patch, -1)  # (N, rows, patch, columns, patch, C)
    return grid.transpose(2, 3).reshape(n, (height // patch) * (width // patch), -1)  # (N, L, patch * patch * C)


def patch_for(image_size: int | tuple[int, int], seq_len: int) -> int:
    """Return the side of the square patches that cut an image into exactly ``seq_len`` tokens.

    Args:
        image_size: Side of a square image, or ``(H, W)``.
        seq_len: Number of tokens wanted.

    Raises:
        InputError: No square patches give that number.

    >>> patch_for(28, 49), patch_for((8, 8), 16)
    (4, 2)
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    possible = {(height // p) * (width // p): p for p in _sides(height, width)}
    if seq_len not in possible:
        raise InputError(
            f"patch_for: no square patches cut a {height} x {width} image into {seq_len} tokens; "
            f"choose one of {', '.join(str(n) for n in sorted(possible))}"
        )
    return possible[seq_len]


def one_hot_target(labels: Tensor, n_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the one-hot rows of labels: the target of the mean squared error.

    Args:
        labels: Whole numbers below ``n_classes``, of any shape.
        n_classes: Number of columns.
        dtype: Floating type of the result.

    Returns:
        ``(*labels.shape, n_classes)``.

    Raises:
        InputError: A label is not a whole number or out of range.

    >>> one_hot_target(torch.tensor([1, 0]), 3).tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"one_hot_target: labels are {labels.dtype}, expected whole numbers; convert them with .long()")
    if labels.numel() and not (int(labels.min()) >= 0 and int(labels.max()) < n_classes):
        seen = f"{int(labels.min())} to {int(labels.max())}"
        raise InputError(f"one_hot_target: labels run from {seen}, expected 0 to {n_classes - 1} for n_classes={n_classes}")
    return torch.nn.functional.one_hot(labels.long(), n_classes).to(dtype)


class _Loaded(NamedTuple):
    images: np.ndarray
    labels: np.ndarray
    n_classes: int
    name: str


def _sides(height: int, width: int) -> list[int]:
    common = math.gcd(height, width)
    return [p for p in range(1, common + 1) if common % p == 0]


@cache
def _all_digits() -> tuple[Any, Any]:
    """Return the pixels, 0 to 16, and the labels of scikit-learn's digits."""
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    bunch = load_digits()
    return bunch.images, bunch.target


def _digits(split: str, seed: int, dtype: torch.dtype) -> ImageDataset:
    from sklearn.model_selection import train_test_split

    pixels, labels = _all_digits()
    halves = train_test_split(np.arange(len(labels)), test_size=DIGITS_TEST, stratify=labels, random_state=seed)
    rows = halves[SPLITS.index(split)]
    images = torch.from_numpy(pixels[rows]).to(dtype) / 16
    return ImageDataset(images, torch.from_numpy(labels[rows]).long(), 10, f"digits {split}")


def _check_split_of_file(path: Path, split: str) -> None:
    test = path.name.startswith(("t10k", "test"))
    train = path.name.startswith(("train", "data_batch"))
    if (test and split == "train") or (train and split == "test"):
        raise InputError(
            f"load_images: asked for the {split} split of {path}, which is the other one; "
            f"pass split={'test' if test else 'train'!r} or the other file"
        )


def _load_file(path: Path) -> _Loaded:
    with path.open("rb") as file:
        magic = file.read(2)
    if magic[:1] == PICKLE_MAGIC:
        images, labels, n_classes = read_cifar(path)
        return _Loaded(images, labels, n_classes, f"CIFAR-{n_classes}")
    if magic in (IDX_MAGIC, GZIP_MAGIC) and not path.name.endswith((".tar.gz", ".tgz")):
        if "images" not in path.name:
            raise InputError(f"load_images: {path.name} does not name an image file; pass the ...-images-idx3-ubyte beside it")
        wanted = path.name.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
        beside = next((place for suffix in ("", ".gz") if (place := path.with_name(wanted + suffix)).is_file()), None)
        if beside is None:
            raise InputError(f"load_images: {path} has no label file beside it; expected {wanted} or {wanted}.gz")
        return _load_idx(path, beside)
    raise InputError(
        f"load_images: {path} begins with {magic!r}: neither IDX (plain or gzipped) nor a pickle; unpack archives first"
    )


def _load_idx(image_file: Path, label_file: Path) -> _Loaded:
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(images) != len(labels):
        raise InputError(
            f"load_images: {len(images)} images in {image_file} but {len(labels)} labels in {label_file}; expected one for each"
        )
    place = image_file.absolute().parent
    name = place.parent.name if place.name == "raw" else place.name
    return _Loaded(images, labels, int(labels.max()) + 1 if labels.size else 0, name)


def _load_folder(folder: Path, split: str) -> _Loaded:
    places = [place for place in (folder, folder / "raw", folder / "MNIST" / "raw") if place.is_dir()]
    for place in places:
        for stem in (f"{_IDX_PREFIX[split]}-images-idx3-ubyte", f"{_IDX_PREFIX[split]}-images.idx3-ubyte"):
            for suffix in ("", ".gz"):
                if (place / (stem + suffix)).is_file():
                    return _load_file(place / (stem + suffix))
    unpacked = [folder / name for name in _CIFAR_FOLDERS if (folder / name).is_dir()]
    if len(unpacked) > 1:
        raise InputError(f"load_images: {folder} holds both {' and '.join(_CIFAR_FOLDERS)}; give the path of one of them")
    for place in (folder, *unpacked):
        if (place / "data_batch_1").is_file() or (place / "test_batch").is_file():
            return _load_cifar10(place, split)
        if (place / split).is_file():
            return _load_file(place / split)
    seen = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "nothing"
    raise InputError(
        f"load_images: no {split} images in {folder}: seen {seen}; expected {_IDX_PREFIX[split]}-images-idx3-ubyte[.gz] (MNIST), "
        f"{split!r} (CIFAR-100) or {'data_batch_1 to 5' if split == 'train' else 'test_batch'} (CIFAR-10)"
    )


def _load_cifar10(folder: Path, split: str) -> _Loaded:
    names = [f"data_batch_{k}" for k in range(1, 6)] if split == "train" else ["test_batch"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"load_images: {folder} lacks {', '.join(missing)} of the {split} split; unpack the whole archive")
    images, labels, n_classes = zip(*(read_cifar(folder / name) for name in names), strict=True)
    return _Loaded(np.concatenate(images), np.concatenate(labels), n_classes[0], f"CIFAR-{n_classes[0]}")

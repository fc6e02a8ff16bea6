"""Readers of the two file formats that small image sets come in: MNIST's IDX and CIFAR's Python pickles.

Both readers trust nothing: sizes are compared with what is really there, and a pickle, which is a program, may only
build what a CIFAR file holds. NumPy itself is never called by the pickle; its arrays arrive in stand-ins.
"""

from __future__ import annotations

import gzip
import math
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from hessiankit.errors import InputError

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


def _allowed(module: str, name: str) -> Callable[..., Any] | None:
    """Return a fresh stand-in for the few globals that a CIFAR file names."""
    if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
        return lambda *_: _PickledArray()
    if (module, name) == ("numpy", "ndarray"):
        return lambda *_: _PickledArray()
    if (module, name) == ("numpy", "dtype"):
        return lambda code, *_: _PickledDType(code)
    if (module, name) == ("_codecs", "encode"):
        return lambda *arguments: _encode(*arguments)
    return None


class _CifarUnpickler(pickle.Unpickler):
    """An unpickler that can build dictionaries, lists, numbers, strings and the stand-ins of this file."""

    def find_class(self, module: str, name: str) -> Any:
        stand_in = _allowed(module, name)
        if stand_in is None:
            raise InputError(
                f"the pickle asks for {module}.{name}, which no CIFAR file needs and which could run code; "
                f"nothing was executed: fetch the file from a source you trust"
            )
        return stand_in

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

"""Writers of small IDX and CIFAR files, independent of the readers that they test."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np


def idx_bytes(array: np.ndarray, kind: int = 0x08) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(path: Path, array: np.ndarray) -> Path:
    path.write_bytes(gzip.compress(idx_bytes(array)) if path.suffix == ".gz" else idx_bytes(array))
    return path


def write_cifar(path: Path, pixels: np.ndarray, labels: list[int], field: str, protocol: int = 2) -> Path:
    content = {
        b"data": pixels,
        field.encode(): labels,
        b"batch_label": b"training batch 1 of 1",
        b"filenames": [b"bos_s_000507.png"] * len(labels),
    }
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def python2_cifar(pixels: np.ndarray, labels: list[int]) -> bytes:
    """Assemble by hand the opcodes that Python 2 wrote: byte strings everywhere, numpy.core, dtype 'u1'."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value  # SHORT_BINSTRING

    raw = pixels.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + text(b"b") + b"\x87R"
    byte_order = b"(K\x03" + text(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00t"
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R" + byte_order + b"b"
    shape = b"K" + bytes([pixels.shape[0]]) + b"M" + struct.pack("<H", pixels.shape[1]) + b"\x86"
    state = b"(K\x01" + shape + dtype + b"\x89" + b"T" + struct.pack("<i", len(raw)) + raw + b"t"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"fine_labels") + numbers + text(b"data") + array + state + b"b" + b"u."

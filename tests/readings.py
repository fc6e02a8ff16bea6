"""The calls that read one Hessian, and their comparison with a matrix that is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.diagonal import CurvatureDiagonal
from hessiankit.curvature.frobenius import FrobeniusNorms

PANEL = 30_000  # bytes


class Reading(NamedTuple):
    """A call and what it says of a matrix.

    Attributes:
        call: (module, inputs, target, *, kind, ...) -> (result, tensor).
        of: (matrix, sizes of the parameters) -> the tensor of a known matrix.
        cut: (tensor, sizes of the parameters) -> its parts, one for each pair of parameters or for each of them.
    """

    call: Callable[..., tuple[Any, Tensor]]
    of: Callable[[Tensor, list[int]], Tensor]
    cut: Callable[[Tensor, list[int]], Sequence[Tensor]]


def _matrix(*args: Any, kind: str = "hessian", **options: Any) -> tuple[hk.Hessian, Tensor]:
    found = hk.hessian(*args, **options)
    return found, found.matrix if kind == "hessian" else found.outer()


def _on_disk(*args: Any, **options: Any) -> tuple[hk.Hessian, Tensor]:
    with TemporaryDirectory() as folder:
        found = hk.hessian(*args, out=Path(folder) / "H.npy", **options)
        return found, found.matrix.clone()


def _products(*args: Any, **options: Any) -> tuple[hk.HessianOperator, Tensor]:
    found = hk.hessian_operator(*args, **options)
    return found, found.to_matrix()


def _diagonal(*args: Any, **options: Any) -> tuple[CurvatureDiagonal, Tensor]:
    found = hk.hessian_diagonal(*args, **options)
    return found, found.flat


def _norms(*args: Any, **options: Any) -> tuple[FrobeniusNorms, Tensor]:
    found = hk.frobenius_norms(*args, **options)
    return found, found.matrix


def _whole(matrix: Tensor, sizes: list[int]) -> Tensor:
    return matrix


def _blocks(matrix: Tensor, sizes: list[int]) -> list[Tensor]:
    return [block for rows in matrix.split(sizes) for block in rows.split(sizes, 1)]


def _block_norms(matrix: Tensor, sizes: list[int]) -> Tensor:
    return torch.stack([block.norm() for block in _blocks(matrix, sizes)]).reshape(len(sizes), -1)


READINGS: dict[str, Reading] = {
    "hessian": Reading(_matrix, _whole, _blocks),
    "hessian_operator": Reading(_products, _whole, _blocks),
    "hessian_diagonal": Reading(_diagonal, lambda matrix, _: matrix.diagonal(), lambda flat, sizes: flat.split(sizes)),
    "frobenius_norms": Reading(_norms, _block_norms, lambda norms, _: norms.reshape(-1, 1).unbind()),
}
"""By the name of the public function."""
BY_PANELS: dict[str, Reading] = {
    "on disk": Reading(_on_disk, _whole, _blocks),
    "norms by panels": READINGS["frobenius_norms"]._replace(call=partial(_norms, panel_bytes=PANEL)),
}
"""Those by some rows at a time."""


def in_turn(number: int) -> dict[str, Reading]:
    """The matrix and, as all of them take the same way to the engine, one of products, diagonal and norms: another for each number."""
    return {name: READINGS[name] for name in ("hessian", list(READINGS)[1 + number % 3])}


def assert_readings(
    expected: Tensor,
    module: nn.Module,
    *data: Any,
    readings: Mapping[str, Reading] = READINGS,
    tolerance: float = 1e-12,
    floor: float = 1e-14,
    **options: Any,
) -> dict[str, Any]:
    """Assert that every reading is that of a matrix; return the results.

    Each part agrees to a tolerance of its own largest entry, or to ``floor`` of the largest entry of all.
    """
    results = {}
    for name, reading in readings.items():
        results[name], found = reading.call(module, *data, **options)
        shapes = results[name].shapes if name != "hessian_diagonal" else {n: x.shape for n, x in results[name].values.items()}
        sizes = [math.prod(shape) for shape in shapes.values()]
        known = reading.of(expected, sizes)
        assert found.shape == known.shape, name
        for a, b in zip(reading.cut(found, sizes), reading.cut(known, sizes), strict=True):
            allowed = max(tolerance * float(b.abs().max()), floor * float(known.abs().max()))
            assert float((a - b).abs().max()) <= allowed, name
    return results

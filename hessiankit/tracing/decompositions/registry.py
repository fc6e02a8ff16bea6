"""The table of decompositions, filled by the modules next to this one, and the operations that torch itself takes apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

COMPOSITE = (
    "adjoint", "broadcast_to", "cartesian_prod", "chain_matmul", "chunk", "column_stack", "concat", "concatenate", "corrcoef",
    "cov", "diff", "divide.Tensor", "dsplit.array", "dsplit.int", "dstack", "expand_as", "fliplr", "flipud", "ger",
    "hsplit.array", "hsplit.int", "hstack", "inner", "kron", "l1_loss", "linalg_matmul", "linalg_matrix_norm.str_ord",
    "linalg_matrix_power", "linalg_multi_dot", "linalg_norm", "linalg_vecdot", "matrix_power", "max.other", "meshgrid",
    "meshgrid.indexing", "min.other", "moveaxis.int", "moveaxis.intlist", "movedim.int", "movedim.intlist", "multiply.Tensor",
    "nanmean", "narrow", "numpy_T", "outer", "pairwise_distance", "poisson_nll_loss", "repeat_interleave.self_Tensor",
    "repeat_interleave.self_int", "reshape_as", "row_stack", "square", "std_mean.dim", "subtract.Tensor", "swapaxes",
    "swapaxes_", "swapdims", "swapdims_", "take_along_dim", "tensor_split.indices", "tensor_split.sections", "tensordot",
    "tile", "trapezoid.dx", "trapezoid.x", "true_divide.Tensor", "unsafe_chunk", "var_mean.dim", "view_as", "vsplit.array",
    "vsplit.int", "vstack",
)  # fmt: skip
"""Operations for which torch itself knows the parts; one without an overload is the default."""

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
for _name in COMPOSITE:
    _packet, _, _overload = _name.partition(".")
    if (_operation := getattr(getattr(aten, _packet, None), _overload or "default", None)) is not None:
        DECOMPOSITIONS[_operation] = _operation.decompose


def decomposes(*operations: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the parts of some operations of ``aten``; parts that return NotImplemented leave a call whole."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSITIONS.update(dict.fromkeys(operations, function))
        return function

    return register

"""The table of decompositions, filled by the modules next to this one, and the operations that torch itself takes apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten

COMPOSITE = (
    "adjoint.default",
    "broadcast_to.default",
    "cartesian_prod.default",
    "chain_matmul.default",
    "chunk.default",
    "column_stack.default",
    "concat.default",
    "concatenate.default",
    "corrcoef.default",
    "cov.default",
    "diff.default",
    "divide.Tensor",
    "dsplit.array",
    "dsplit.int",
    "dstack.default",
    "expand_as.default",
    "fliplr.default",
    "flipud.default",
    "ger.default",
    "hsplit.array",
    "hsplit.int",
    "hstack.default",
    "inner.default",
    "kron.default",
    "l1_loss.default",
    "linalg_matmul.default",
    "linalg_matrix_norm.str_ord",
    "linalg_matrix_power.default",
    "linalg_multi_dot.default",
    "linalg_norm.default",
    "linalg_vecdot.default",
    "matrix_power.default",
    "max.other",
    "meshgrid.default",
    "meshgrid.indexing",
    "min.other",
    "moveaxis.int",
    "moveaxis.intlist",
    "movedim.int",
    "movedim.intlist",
    "multiply.Tensor",
    "nanmean.default",
    "narrow.default",
    "numpy_T.default",
    "outer.default",
    "pairwise_distance.default",
    "poisson_nll_loss.default",
    "repeat_interleave.self_Tensor",
    "repeat_interleave.self_int",
    "reshape_as.default",
    "row_stack.default",
    "square.default",
    "std_mean.dim",
    "subtract.Tensor",
    "swapaxes.default",
    "swapdims.default",
    "take_along_dim.default",
    "tensor_split.indices",
    "tensor_split.sections",
    "tensordot.default",
    "tile.default",
    "trapezoid.dx",
    "trapezoid.x",
    "true_divide.Tensor",
    "unsafe_chunk.default",
    "var_mean.dim",
    "view_as.default",
    "vsplit.array",
    "vsplit.int",
    "vstack.default",
)
"""Operations for which torch itself knows the parts."""

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
for _name in COMPOSITE:
    _packet, _overload = _name.split(".")
    if (_operation := getattr(getattr(aten, _packet, None), _overload, None)) is not None:
        DECOMPOSITIONS[_operation] = _operation.decompose


@dataclass(frozen=True)
class Sometimes:
    """A decomposition of some calls of an operation, chosen by their arguments; other calls stay whole."""

    parts: Callable[..., Any]
    applies: Callable[..., bool]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.parts(*args, **kwargs) if self.applies(*args, **kwargs) else NotImplemented


def decomposes(*operations: Any, when: Callable[..., bool] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the parts of some operations.

    Args:
        operations: Of ``aten``.
        when: Called with the operation's arguments: whether this call has parts. (Parts that return NotImplemented leave the
            operation whole as well, but recording them takes longer.)
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSITIONS.update(dict.fromkeys(operations, function if when is None else Sometimes(function, when)))
        return function

    return register

"""A linear operator on torch tensors and NumPy arrays, known by its products with rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy as shallow_copy
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from hessiankit.support.errors import InputError
from hessiankit.support.memory import check_matrix
from hessiankit.support.torch_state import full_precision

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R")


class TensorOperator(LinearOperator):
    """A matrix A (m, n) by its products: ``@`` takes torch vectors (n,) and matrices (n, k), and NumPy arrays of those shapes.

    A ``scipy.sparse.linalg.LinearOperator``, which SciPy's solvers take directly.

    Attributes:
        shape: (m, n).
        dtype: The dtype as NumPy spells it, which SciPy needs; ``torch_dtype`` is torch's. One object cannot have both: SciPy
            reads ``A.dtype.char``, and torch's functions take nothing but a ``torch.dtype``. So estimators that draw torch
            vectors by ``A.dtype``, such as those of curvlinops, take ``A.to_torch()``.
        device: Where products are computed.
        block_size: Vectors treated at once.
    """

    block_size: int = 1
    order: str = ""
    """Order of a vector's entries, in the words of error messages."""
    of_pieces: bool = False
    """Whether a vector is a piece, of which other processes hold the rest."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.torch_dtype, self.device = dtype, device
        self._numpy_dtype = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        super().__init__(self._numpy_dtype, shape)

    @property
    def size(self) -> int:
        """Number of entries of a vector, those of other processes included."""
        return int(self.shape[1])

    def same_call(self, caller: str, **options: Any) -> AbstractContextManager[None]:
        """Let all processes that hold the operator make one call within the context, with the same options."""
        return nullcontext()

    @abstractmethod
    def _rows(self, rows: Tensor) -> Tensor:
        """Return A times the rows, as rows: (S, n) to (S, m), S > 0."""

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, Tensor):
            return self._product(other)
        if isinstance(other, LinearOperator):
            return super().__matmul__(other)
        if not isinstance(other, (np.ndarray, list, tuple)):
            raise InputError(
                f"{self._name}: cannot multiply with a {type(other).__name__}; expected a torch tensor or a NumPy array, "
                f"a vector ({self.shape[1]},) or a matrix ({self.shape[1]}, k)"
            )
        return self._numpy_product(other)

    def dot(self, x: Any) -> Any:
        """Return the product with a torch tensor, a NumPy array, a list of numbers, a number or another operator."""
        return super().dot(x) if np.isscalar(x) or isinstance(x, LinearOperator) else self @ x

    @full_precision()
    def to_matrix(self) -> Tensor:
        """Return the m x n matrix, a block of columns at a time.

        Raises:
            OutOfMemoryError: If it does not fit.
        """
        m, n = self.shape
        check_matrix(f"{self._name}.to_matrix", m, n, self.torch_dtype, self.device)
        out = torch.empty(n, m, dtype=self.torch_dtype, device=self.device)
        for start in range(0, n, self.block_size):
            units = out.new_zeros(min(self.block_size, n - start), n)
            units.diagonal(start).fill_(1.0)
            out[start : start + units.shape[0]] = self._rows(units)
        return out.T

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.to_matrix().cpu().numpy(), dtype=dtype, copy=copy)  # type: ignore[arg-type]

    def to_torch(self) -> Self:
        """Return the same operator with torch's ``dtype``, as the estimators of curvlinops expect it."""
        return self._with_dtype(self.torch_dtype)

    def to_scipy(self) -> Self:
        """Return the same operator with NumPy's ``dtype``, as SciPy expects it."""
        return self._with_dtype(self._numpy_dtype)

    def _with_dtype(self, dtype: Any) -> Self:
        operator = shallow_copy(self)
        operator.dtype = dtype
        return operator

    @property
    def _name(self) -> str:
        return type(self).__name__

    @full_precision()
    def _product(self, vectors: Tensor) -> Tensor:
        expected = f"a vector ({self.shape[1]},) or a matrix ({self.shape[1]}, k)"
        if vectors.ndim not in (1, 2) or vectors.shape[0] != self.shape[1]:
            raise InputError(f"{self._name}: cannot multiply with shape {tuple(vectors.shape)}; expected {expected}{self.order}")
        if vectors.dtype != self.torch_dtype:
            raise InputError(f"{self._name}: the vectors are {vectors.dtype}; expected {self.torch_dtype}: convert them")
        if vectors.device != self.device:
            raise InputError(f"{self._name}: the vectors are on {vectors.device}, the operator on {self.device}; move them")
        if not (vectors.numel() or self.of_pieces):
            return vectors.new_zeros(self.shape[0], *vectors.shape[1:])
        if vectors.ndim == 1:
            return self._rows(vectors.detach().unsqueeze(0))[0]
        return self._rows(vectors.detach().T).T

    def _numpy_product(self, array: Any) -> np.ndarray[Any, Any]:
        try:
            x = np.asarray(array)
        except ValueError as error:  # rows of several lengths
            raise InputError(f"{self._name}: cannot multiply with a {type(array).__name__}: {error}") from error
        if not np.can_cast(x.dtype, self._numpy_dtype):
            raise InputError(f"{self._name}: the array is {x.dtype}, which {self._numpy_dtype} cannot hold; convert it")
        vectors = torch.from_numpy(np.array(x, dtype=self._numpy_dtype, order="C")).to(self.device, self.torch_dtype)
        result: np.ndarray[Any, Any] = self._product(vectors).cpu().numpy()
        return result

    _matvec = _matmat = _numpy_product  # what SciPy calls

    def _transpose(self) -> LinearOperator:
        return self._adjoint()  # real


def by_all_processes(function: Callable[P, R]) -> Callable[P, R]:
    """Call a function of an operator, its first argument, on all processes that hold it, with the same options."""
    first = next(iter(signature(function).parameters))

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        operator = args[0] if args else options.get(first)
        if not isinstance(operator, TensorOperator):
            return function(*args, **options)
        is_plain = {name: x is None or isinstance(x, (bool, int, float, str)) for name, x in options.items()}
        compared = {name: x if is_plain[name] else type(x) for name, x in options.items()}
        with operator.same_call(function.__name__, **compared):
            return function(*args, **options)

    return called


class MatrixOperator(TensorOperator):
    """The matrix of a :class:`hessiankit.Hessian` as an operator, which checks the vectors that it multiplies."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__((len(matrix), len(matrix)), matrix.dtype, matrix.device)
        self.matrix = matrix

    def _rows(self, rows: Tensor) -> Tensor:
        return rows @ self.matrix

"""The exact Hessian of a module's loss from the closed forms of its primitives."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hessiankit.curvature.evaluation import Evaluation, automatic
from hessiankit.curvature.forecast import forecast
from hessiankit.curvature.streaming import check_out, write_matrix
from hessiankit.engine.diagnosis import without_effect
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.handshake import UNCOMPARED
from hessiankit.request.read import read_request
from hessiankit.request.selection import chosen
from hessiankit.request.signature import RequestArguments, asks
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, check_count
from hessiankit.support.lanczos import lanczos
from hessiankit.support.tables import Piece, Printed, sizes, table
from hessiankit.support.torch_state import one_at_a_time, wide

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from typing_extensions import Unpack

    from hessiankit.curvature.plot_frame import Picture


LANCZOS_ROWS = 512  # rows from which on Lanczos's method finds the norm of a symmetric matrix


def spectral_norm(matrix: Tensor, *, symmetric: bool = False) -> float:
    """Return the spectral norm of a matrix, in float64: Lanczos for large symmetric ones, else the smaller Gram matrix.

    >>> spectral_norm(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
    4.0
    """
    a = matrix.detach().double() if matrix.device.type != "mps" else matrix.detach().cpu().double()
    largest = float(a.abs().max()) if a.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    a = a / largest
    if symmetric and len(a) > LANCZOS_ROWS:
        return largest * norm_by_lanczos(a)[0]
    if symmetric:
        return largest * float(torch.linalg.eigvalsh(a).abs().max())
    gram = a @ a.T if a.shape[0] <= a.shape[1] else a.T @ a
    return largest * math.sqrt(float(torch.linalg.eigvalsh(gram)[-1]))


def norm_by_lanczos(A: Tensor) -> tuple[float, Tensor]:
    """Return |A|_2 of a symmetric matrix, by Lanczos's method on its square, and a unit vector v with |A v| of that size."""
    generator = torch.Generator(A.device).manual_seed(0)
    first = torch.randn(len(A), generator=generator, dtype=A.dtype, device=A.device)
    top = lanczos(lambda v: A @ (A @ v), first, tol=1e-12, most=len(A), basis=40)
    assert top.vector is not None
    return math.sqrt(top.value), top.vector


def top_eigenvalues(values: Tensor, k: int | None) -> Tensor:
    """Return the k eigenvalues of largest magnitude, in ascending order; None: all of them.

    >>> top_eigenvalues(torch.tensor([-3.0, -1.0, 2.0]), 2).tolist()
    [-3.0, 2.0]
    """
    if k is not None and k < 1:
        raise InputError(f"eigvalsh: k={k} asks for no eigenvalue; pass 1 or more, or None for all")
    return values[values.abs().argsort(descending=True)[:k].sort().values]


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


@dataclass(frozen=True, repr=False)
class Hessian(Printed):
    """The Hessian of a scalar loss with respect to a module's parameters.

    With ``lazy=True`` the matrix is computed when it is first read, and single blocks before that by themselves;
    ``asymmetry``, ``fallbacks`` and ``seconds`` then are those of what has been computed so far.

    Attributes:
        names: Parameter names, as ``named_parameters()`` spells them.
        slices: Rows (and columns) of each parameter.
        shapes: Shape of each parameter.
    """

    names: tuple[str, ...]
    slices: dict[str, slice]
    shapes: dict[str, tuple[int, ...]]
    _evaluation: Evaluation = field(compare=False)
    _norms: dict[tuple[str | None, str | None], float] = field(default_factory=dict, compare=False)

    @property
    def matrix(self) -> Tensor:
        """The P x P tensor, rows and columns in the order of ``names``, each parameter in row-major order (vec_r)."""
        return self._evaluation.whole()

    @property
    def loss(self) -> float:
        """The loss at this point."""
        return self._evaluation.loss

    @property
    def asymmetry(self) -> float:
        """Largest ``|H - H^T|`` before symmetrisation, relative to the largest entry: the rounding level."""
        return self._evaluation.asymmetry

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Operations without a closed form, which were differentiated automatically one by one."""
        return self._evaluation.fallbacks

    @property
    def unused(self) -> tuple[str, ...]:
        """Parameters that never affect the loss; their rows and columns are zero."""
        return self._evaluation.unused

    @property
    def handshake(self) -> bool:
        """Whether loss and gradient were compared with those of the module's own call."""
        return self._evaluation.handshake

    @property
    def seconds(self) -> float:
        """Time taken."""
        return self._evaluation.seconds

    @property
    def shape(self) -> tuple[int, int]:
        """(P, P)."""
        return (self._evaluation.batches[0].size,) * 2

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of :attr:`matrix`, as torch spells it."""
        return self._evaluation.batches[0].dtype

    @property
    def T(self) -> Hessian:
        """The transpose: the Hessian itself."""
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.matrix.cpu().numpy(), dtype=dtype, copy=copy)  # type: ignore[arg-type]

    def __matmul__(self, other: Any) -> Any:
        from hessiankit.curvature.tensor_operator import MatrixOperator  # only here: SciPy

        return MatrixOperator(self.matrix) @ other

    def __getitem__(self, key: Any) -> Tensor:
        """Return ``H[names_i, names_j]`` as :meth:`block` does, ``H[names]`` for both; else index :attr:`matrix` as a tensor."""
        if not any(isinstance(part, str) for part in torch.utils._pytree.tree_leaves(key)):
            return self.matrix[key]
        return self.block(*key) if isinstance(key, tuple) and len(key) == 2 else self.block(key, key)

    def block(self, name_i: Any, name_j: Any) -> Tensor:
        """Return d^2 loss / d vec_r(name_i) d vec_r(name_j)^T, of shape (n_i, n_j).

        A name may be followed by an index: ``"attn.c_attn.weight[:, :32]"`` are the entries ``weight[:, :32]``, in vec_r's
        order, and ``"w[0:4; 12:16]"`` two ranges of rows, one after the other. With ``lazy=True`` a small part of a large
        parameter costs only itself: the whole block is not computed. A pattern such as ``"layers.0.*"``, or a list of names and
        patterns, means all of its parameters, in the order of ``names``, each once.

        Raises:
            InputError: If there is no such parameter, or the index does not fit it.
        """
        rows, columns = (chosen("Hessian.block", names, self.shapes) for names in (name_i, name_j))
        parts = [_joined([self._evaluation.part(i, at, j, to) for j, to in columns.items()], 1) for i, at in rows.items()]
        return _joined(parts, 0)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield every pair of names (i, j) with i not after j."""
        yield from combinations_with_replacement(self.names, 2)

    def outer(self) -> Tensor:
        """Return the outer-product (Gauss-Newton) part J^T L'' J, P x P (Closing the Curvature Gap, Eq. 3)."""
        return self._evaluation.outer()

    def functional(self) -> Tensor:
        """Return the functional part (L' (x) I) d^2 f, P x P: the Hessian less its outer-product part."""
        return self.matrix - self.outer()

    def spectral_norm(self, name_i: str | None = None, name_j: str | None = None) -> float:
        """Return the spectral norm of the whole matrix, or of a block as in :meth:`block`; of one name, a diagonal one."""
        key = (name_i, name_j or name_i)
        if key not in self._norms:
            self._norms[key] = spectral_norm(self._part("spectral_norm", name_i, name_j), symmetric=key[0] == key[1])
        return self._norms[key]

    def frobenius_norm(self, name_i: str | None = None, name_j: str | None = None) -> float:
        """Return the Frobenius norm of the whole matrix, or of a block as in :meth:`block`; of one name, a diagonal one."""
        return float(torch.linalg.matrix_norm(self._part("frobenius_norm", name_i, name_j)))

    def _part(self, caller: str, name_i: str | None, name_j: str | None) -> Tensor:
        if name_i is None and name_j is not None:
            raise InputError(
                f"Hessian.{caller}: name_j={name_j!r} without name_i; pass both for a block, or {name_j!r} alone as name_i for "
                "the diagonal one"
            )
        return self.matrix if name_i is None else self.block(name_i, name_j or name_i)

    def diagonal(self) -> Tensor:
        """Return the diagonal (P,); with ``lazy=True`` only the diagonal blocks are computed for it."""
        return torch.cat([self.block(name, name).diagonal() for name in self.names])

    def trace(self) -> float:
        """Return the trace."""
        return float(self.diagonal().to(wide(self.diagonal().device)).sum())

    def eigvalsh(self, k: int | None = None) -> Tensor:
        """Return the eigenvalues in ascending order: all P, or the k of largest magnitude."""
        return top_eigenvalues(torch.linalg.eigvalsh(self.matrix), k)

    def plot(self, path: Path | str | None = None, *, title: str | None = None, ax: Axes | None = None) -> Picture:
        """Draw the entries in log scale, block by block, under a title; see :func:`hessiankit.curvature.plots.heatmap`.

        The Matplotlib figure has a ``caption`` that says how to read the map. It is written to ``path``, as ``.png``, ``.svg`` or
        ``.pdf``, or the norms of the blocks, as ``.csv``; an InputError says why it cannot be. With ``ax`` map, labels and
        colour bar are drawn into these axes, and their figure is returned.
        """
        from hessiankit.curvature.plots import heatmap  # only here: Matplotlib

        return heatmap(self.matrix, self.names, self.slices, title=title, path=path, ax=ax)

    def to_dict(self) -> dict[str, Any]:
        """Return names, sizes and block norms as plain Python numbers (the matrix itself is left out)."""
        matrix = self.matrix
        blocks = [
            {"row": i, "column": j, "spectral_norm": self.spectral_norm(i, j), "frobenius_norm": self.frobenius_norm(i, j)}
            for i, j in self.pairs()
        ]
        return {
            "parameters": int(matrix.shape[0]),
            "dtype": str(matrix.dtype),
            "loss": self.loss,
            "asymmetry": self.asymmetry,
            "fallbacks": list(self.fallbacks),
            "unused": list(self.unused),
            "seconds": self.seconds,
            "shapes": {n: list(s) for n, s in self.shapes.items()},
            "blocks": blocks,
        }

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        is_complete = self._evaluation.is_complete
        for n in self.names:
            norms = (f"{float(self.block(n, n).trace()):.4g}", f"{self.frobenius_norm(n):.4g}") if is_complete else ("", "")
            yield n, sizes(self.shapes[n]), *norms

    def _headline(self) -> str:
        size = sum(rows.stop - rows.start for rows in self.slices.values())
        if not self._evaluation.is_complete:
            return f"Hessian: {size} x {size}, computed when it is read; block(name_i, name_j) computes one block"
        title = f"Hessian: {size} x {size}, {self.matrix.dtype}, loss {self.loss:.6g}, {self.seconds:.2f} s"
        title += automatic(self.fallbacks)
        title += f"; no effect on the loss: {', '.join(map(repr, self.unused))}" if self.unused else ""
        return title + ("" if self.handshake else UNCOMPARED)

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        yield table(_HEADERS, self._rows(), left=2, names=self.names, drop=("shape",))


_HEADERS = ("parameter", "shape", "trace", "||H_ii||_F")


@checked("hessian")
@one_at_a_time
@asks(RequestArguments)
def hessian(
    module: nn.Module,
    inputs: Any,
    target: Any = None,
    *,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    lazy: bool = False,
    out: str | os.PathLike[str] | Tensor | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    **asked: Unpack[RequestArguments],
) -> Hessian:
    """Return the exact Hessian of ``loss(module(inputs), target)`` with respect to the module's parameters.

    One closed form per primitive, summed as H = sum_v J_v^T [lambda_v . D^2 phi_v] J_v (Closing the Curvature Gap,
    Eq. 3 and 6 in their corrected form, to any depth); no automatic differentiation, except for operations that
    ``Hessian.fallbacks`` names. Parameters and data are copied: later changes do not affect the result.

    Args:
        module: Any module whose forward torch can trace.
        inputs: A tensor, a tuple of positional arguments, or a mapping of keyword arguments (a dict, a tokenizer's output).
            Or several batches, such as a ``DataLoader``: an iterable of pairs (inputs, target), with loss=None of inputs (a list
            of tuples or mappings, or any generator; a tuple is one batch). They are treated one after the other, at any lengths.
            It is read once; without a length it may hold 1,000 batches.
        target: What the loss compares with: the output's shape for "mse", labels of shape ``output.shape[:-1]``
            for "cross_entropy". No label is shifted: labels[:, t] is compared with logits[:, t]. Without a target, the
            ``"labels"`` of a mapping are the target for a named loss: for "cross_entropy" they are compared with the logits
            that the model's own loss compares them with, in a causal language model those of the place before.
        **asked: Arguments of :class:`~hessiankit.request.signature.RequestArguments`.
        batch_size: Samples treated at once; chosen by available work space by default.
        progress: Called with (samples done, samples in all).
        lazy: Check everything, compute nothing yet: ``.block(i, j)`` computes one pair of parameters, ``.matrix`` all.
        out: Where the matrix goes: a contiguous (P, P) tensor; or the path of a file (``.npy``), in which it is written, about
            256 MiB of rows at a time, at least those of one parameter, instead of being kept in memory. In a file that is not
            complete, the diagonal entry of every unfinished row is NaN.
        overwrite: Replace a file that exists at ``out``.
        resume: Keep the finished rows of a file that exists at ``out`` and compute the others. A random combination of the
            finished rows of each parameter is compared with a product with this Hessian first.
        dry_run: Compute nothing; return a forecast of memory, disk and time.

    Returns:
        A :class:`Hessian`; with ``dry_run=True`` a :class:`~hessiankit.curvature.forecast.Forecast`.

    Raises:
        InputError: If an argument cannot be used, or if an entry of the result is not finite; or if there is a file at ``out``,
            or with ``resume=True`` one of another matrix.
        TraceError: If torch cannot trace the module.
        OutOfMemoryError: If the P x P matrix (with ``out``, some rows of it) or the derivatives of one chunk of samples do not
            fit, before they are computed.

    The Hessian of a linear layer under squared error, 2/(L d_out) X^T X (x) I, known by hand:

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    >>> hessian(layer, x, torch.zeros(2, 1, dtype=torch.float64)).matrix.tolist()
    [[2.0, 2.0], [2.0, 4.0]]
    """
    start = time.perf_counter()
    if lazy and (out is not None or dry_run):
        raise InputError("hessian: lazy=True computes single blocks later; it goes with neither out=... nor dry_run=True")
    path = None if out is None or isinstance(out, Tensor) else check_out(out)
    if path is None and (overwrite or resume):
        raise InputError(f"hessian: {'overwrite' if overwrite else 'resume'}=True is for out=..., which is missing")
    if overwrite and resume:
        raise InputError("hessian: overwrite=True loses what resume=True keeps; pass one of the two")
    check_count("batch_size", batch_size, "sample")
    if dry_run:
        asked["handshake"] = False
    request = read_request(module, inputs, target, compares=True, **asked)
    batches = request.together()
    if dry_run:
        return forecast(batches, batch_size, path)  # type: ignore[return-value]
    evaluation = Evaluation(batches, batch_size, progress, second_order=request.second_order)
    if isinstance(out, Tensor):
        _check_tensor(out, batches[0])
    if path is not None:
        with torch.no_grad():
            write_matrix(path, evaluation, overwrite=overwrite, resume=resume)
    result = hessian_of(evaluation, out if isinstance(out, Tensor) else None, lazy=lazy)
    if lazy:
        evaluation.seal()
    else:
        evaluation.seconds = time.perf_counter() - start
    return result


def hessian_of(evaluation: Evaluation, into: Tensor | None = None, *, lazy: bool = False) -> Hessian:
    """Return the Hessian of some batches; with ``lazy=True`` nothing is computed yet.

    Raises:
        InputError: No parameter has an effect on the loss, or an entry is not finite.
    """
    first = evaluation.batches[0]
    shapes = first.shapes
    if not lazy:
        evaluation.whole(into)
        if len(evaluation.unused) == len(shapes):
            raise without_effect("hessian", shapes)
    return Hessian(tuple(shapes), first.slices, shapes, evaluation)


def _check_tensor(out: Tensor, batch: BatchLoss) -> None:
    n, dtype, device = batch.size, batch.dtype, batch.device
    if out.shape != (n, n) or out.dtype != dtype or out.device != device or not out.is_contiguous() or out.requires_grad:
        raise InputError(
            f"hessian: out has shape {tuple(out.shape)}, {out.dtype} on {out.device}; pass a contiguous tensor of shape "
            f"{(n, n)}, {dtype} on {device}, without requires_grad"
        )

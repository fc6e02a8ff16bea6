"""The exact Hessian of a module's loss from the closed forms of its primitives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

from derivations.loss import CrossEntropy, MeanSquaredError
from hessiankit.errors import InputError, TraceError
from hessiankit.sweep import Accumulator, BlockSum
from hessiankit.tables import as_html, as_text, table
from hessiankit.task import IGNORE_INDEX, Loss, Task, check_memory, make_task
from hessiankit.trace import Application, Trace, trace

WIDEST = 64  # a module's widest value, in units of its inputs, that is taken for granted before its work space is measured
WORKSPACE = 512 * 2**20  # bytes of tangents that a chunk of samples may take


def spectral_norm(matrix: Tensor, *, symmetric: bool = False) -> float:
    """Return the spectral norm of a matrix, in float64: Lanczos for large symmetric ones, else the smaller Gram matrix.

    >>> spectral_norm(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
    4.0
    """
    a = matrix.detach().double().cpu()
    largest = float(a.abs().max()) if a.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    a = a / largest
    if symmetric and a.shape[0] > 512:
        start = np.random.default_rng(0).standard_normal(a.shape[0])
        return largest * float(abs(eigsh(a.numpy(), k=1, which="LM", v0=start, return_eigenvectors=False)[0]))
    if symmetric:
        return largest * float(torch.linalg.eigvalsh(a).abs().max())
    gram = a @ a.T if a.shape[0] <= a.shape[1] else a.T @ a
    return largest * math.sqrt(float(torch.linalg.eigvalsh(gram)[-1]))


@dataclass(frozen=True, repr=False)
class Hessian:
    """The Hessian of a scalar loss with respect to a module's parameters.

    Attributes:
        matrix: The P x P tensor, rows and columns in the order of ``names``, each parameter in row-major order (vec_r).
        names: Parameter names, as ``named_parameters()`` spells them.
        slices: Rows (and columns) of each parameter.
        shapes: Shape of each parameter.
        loss: The loss at this point.
        asymmetry: Largest ``|H - H^T|`` before symmetrisation, relative to the largest entry: the rounding level.
        fallbacks: Operations without a closed form, which were differentiated automatically one by one.
        seconds: Time taken.
    """

    matrix: Tensor
    names: tuple[str, ...]
    slices: dict[str, slice]
    shapes: dict[str, tuple[int, ...]]
    loss: float
    asymmetry: float
    fallbacks: tuple[str, ...]
    seconds: float
    _outer: Callable[[], Tensor] = field(compare=False)
    _norms: dict[tuple[str | None, str | None], float] = field(default_factory=dict, compare=False)

    def block(self, name_i: str, name_j: str) -> Tensor:
        """Return d^2 loss / d vec_r(name_i) d vec_r(name_j)^T, of shape (n_i, n_j)."""
        for name in (name_i, name_j):
            if name not in self.slices:
                raise InputError(f"Hessian.block: no parameter {name!r}; there are: {', '.join(self.names)}")
        return self.matrix[self.slices[name_i], self.slices[name_j]]

    @property
    def short_names(self) -> tuple[str, ...]:
        """The last parts of the names that tell the parameters apart."""
        for parts in range(1, 1 + max(n.count(".") + 1 for n in self.names)):
            short = tuple(".".join(n.split(".")[-parts:]) for n in self.names)
            if len(set(short)) == len(short):
                return short
        return self.names

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield every pair of names (i, j) with i not after j."""
        for a, i in enumerate(self.names):
            for j in self.names[a:]:
                yield i, j

    def outer(self) -> Tensor:
        """Return the outer-product (Gauss-Newton) part J^T L'' J, P x P (Closing the Curvature Gap, Eq. 3)."""
        return self._outer()

    def functional(self) -> Tensor:
        """Return the functional part (L' (x) I) d^2 f, P x P: the Hessian less its outer-product part."""
        return self.matrix - self._outer()

    def spectral_norm(self, name_i: str | None = None, name_j: str | None = None) -> float:
        """Return the spectral norm of the whole matrix, or of one block."""
        key = (name_i, name_j or name_i)
        if key not in self._norms:
            part = self.matrix if name_i is None else self.block(name_i, name_j or name_i)
            self._norms[key] = spectral_norm(part, symmetric=key[0] == key[1])
        return self._norms[key]

    def frobenius_norm(self, name_i: str | None = None, name_j: str | None = None) -> float:
        """Return the Frobenius norm of the whole matrix, or of one block."""
        return float(torch.linalg.matrix_norm(self.matrix if name_i is None else self.block(name_i, name_j or name_i)))

    def eigvalsh(self) -> Tensor:
        """Return the P eigenvalues in ascending order."""
        return torch.linalg.eigvalsh(self.matrix)

    def to_dict(self) -> dict[str, Any]:
        """Return names, sizes and block norms as plain Python numbers (the matrix itself is left out)."""
        blocks = [
            {"row": i, "column": j, "spectral_norm": self.spectral_norm(i, j), "frobenius_norm": self.frobenius_norm(i, j)}
            for i, j in self.pairs()
        ]
        return {
            "parameters": int(self.matrix.shape[0]),
            "dtype": str(self.matrix.dtype),
            "loss": self.loss,
            "asymmetry": self.asymmetry,
            "fallbacks": list(self.fallbacks),
            "seconds": self.seconds,
            "shapes": {n: list(s) for n, s in self.shapes.items()},
            "blocks": blocks,
        }

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for n in self.names:
            shape = " x ".join(map(str, self.shapes[n])) or "1"
            yield n, shape, f"{self.spectral_norm(n):.4g}", f"{self.frobenius_norm(n):.4g}"

    def _title(self) -> str:
        size = self.matrix.shape[0]
        title = f"Hessian: {size} x {size}, {self.matrix.dtype}, loss {self.loss:.6g}, {self.seconds:.2f} s"
        return title + (f"; differentiated automatically: {', '.join(self.fallbacks)}" if self.fallbacks else "")

    def __repr__(self) -> str:
        return as_text(self._title(), table(_HEADERS, self._rows(), left=2))

    def _repr_html_(self) -> str:
        return as_html(_HEADERS, self._rows(), caption=self._title())


_HEADERS = ("parameter", "shape", "||H_ii||_2", "||H_ii||_F")


def hessian(
    module: nn.Module,
    inputs: Any,
    target: Tensor | None = None,
    *,
    loss: Loss = "mse",
    params: Iterable[str] | None = None,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Hessian:
    """Return the exact Hessian of ``loss(module(inputs), target)`` with respect to the module's parameters.

    One closed form per primitive, summed as H = sum_v J_v^T [lambda_v . D^2 phi_v] J_v (Closing the Curvature Gap,
    Eq. 3 and 6 in their corrected form, to any depth); no automatic differentiation, except for operations that
    ``Hessian.fallbacks`` names.

    Args:
        module: Any module whose forward torch can trace and which returns one tensor.
        inputs: A tensor, or a tuple of positional arguments.
        target: What the loss compares with: the output's shape for "mse", labels of shape ``output.shape[:-1]``
            for "cross_entropy".
        loss: ``"mse"``: mean over all entries of the squared difference, the papers' 1/(L d_V) ||Z - T||_F^2.
            ``"cross_entropy"``: mean over the labels that are not -100. A callable ``(outputs, target) -> scalar``.
            None: the module returns the loss.
        params: Names of the parameters to take; all that require grad by default.
        batch_size: Samples treated at once; chosen by available work space by default.
        progress: Called with (samples done, samples in all).

    Returns:
        A :class:`Hessian`.

    Raises:
        InputError: If an argument cannot be used.
        TraceError: If torch cannot trace the module.
        OutOfMemoryError: If the P x P matrix does not fit, before anything is computed.

    The Hessian of a linear layer under squared error, 2/(L d_out) X^T X (x) I, known by hand:

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    >>> hessian(layer, x, torch.zeros(2, 1, dtype=torch.float64)).matrix.tolist()
    [[2.0, 2.0], [2.0, 4.0]]
    """
    start = time.perf_counter()
    if batch_size is not None and batch_size < 1:
        raise InputError(f"hessian: batch_size={batch_size} leaves no sample to treat; pass 1 or more, or None")
    first = next((p for p in module.parameters() if p.requires_grad), None) if isinstance(module, nn.Module) else None
    if first is not None:
        wanted = None if params is None else set([params] if isinstance(params, str) else (params := list(params)))
        size = sum(p.numel() for n, p in module.named_parameters() if p.requires_grad and (wanted is None or n in wanted))
        check_memory("hessian", size, first.dtype, first.device)
    task = make_task("hessian", module, inputs, target, loss, params)
    with torch.no_grad():
        matrix, value, fallbacks = _assemble(task, batch_size, progress, outer=False)
        asymmetry = _symmetrise(matrix)

    def outer() -> Tensor:
        if task.loss is None:
            raise InputError(
                "Hessian.outer: with loss=None the module returns the loss, so its output layer is unknown; pass loss=..."
            )
        with torch.no_grad():
            part = _assemble(task, batch_size, None, outer=True)[0]
            _symmetrise(part)
        return part

    return Hessian(
        matrix,
        tuple(task.parameters),
        task.slices,
        {n: tuple(p.shape) for n, p in task.parameters.items()},
        value,
        asymmetry,
        fallbacks,
        time.perf_counter() - start,
        outer,
    )


def _assemble(
    task: Task, batch_size: int | None, progress: Callable[[int, int], None] | None, *, outer: bool
) -> tuple[Tensor, float, tuple[str, ...]]:
    first = next(iter(task.parameters.values()))
    total = BlockSum()
    normalizer = normalizer_of(task)
    splittable = isinstance(task.loss, str) and _samples_are_independent(task)
    batch = task.batch
    probe = splittable and WIDEST * task.size * _entries(task) * first.dtype.itemsize > WORKSPACE  # else the whole batch fits
    step = (1 if probe else batch) if batch_size is None else batch_size
    value, done = 0.0, 0
    fallbacks: tuple[str, ...] = ()
    while done < batch:
        rows = slice(done, min(done + step, batch))
        traced = loss_trace(task.part(rows) if splittable else task, normalizer)
        accumulator = Accumulator(traced.trace, total, traced.output if outer else None)
        accumulator.run()
        value += float(traced.trace.values[traced.trace.output])
        fallbacks = traced.trace.fallbacks
        done = rows.stop if splittable else batch
        if batch_size is None and probe and rows.start == 0:
            step = max(1, min(batch - done, int(WORKSPACE / max(accumulator.peak_bytes, 1)))) if done < batch else step
        if progress is not None:
            progress(done, batch)
    matrix = torch.zeros(task.size, task.size, dtype=first.dtype, device=first.device)
    total.write(matrix, task.slices)
    return matrix, value, fallbacks


def _entries(task: Task) -> int:
    return sum(x.numel() for x in (*task.inputs, task.target) if isinstance(x, Tensor))


@dataclass(frozen=True)
class LossTrace:
    """A trace that ends in the scalar loss, with the id of the module's output in it."""

    trace: Trace
    output: int | None


def loss_trace(task: Task, normalizer: float) -> LossTrace:
    """Trace a module and its loss into one scalar."""
    traced = trace(task.call, task.parameters, task.inputs)
    output = traced.output
    z = traced.values[output]
    if task.loss is None:
        if z.numel() != 1:
            raise TraceError(f"trace: with loss=None the module must return a scalar, got shape {tuple(z.shape)}")
        return LossTrace(traced, None)
    target = task.target
    assert target is not None
    if isinstance(task.loss, str):
        primitive = (
            MeanSquaredError(normalizer) if task.loss == "mse" else CrossEntropy(ignore_index=IGNORE_INDEX, normalizer=normalizer)
        )
        at = traced.add_value(target)
        traced.output = traced.apply(primitive, (output, at), primitive.value(z, target), task.loss)
        return LossTrace(traced, output)
    function = task.loss
    tail = trace(lambda p, t: function(p["outputs"], t), {"outputs": z}, (target,))
    if tail.values[tail.output].numel() != 1:
        raise InputError(f"hessian: the loss returned shape {tuple(tail.values[tail.output].shape)}, expected a scalar")
    _splice(traced, tail)
    return LossTrace(traced, output)


def _splice(head: Trace, tail: Trace) -> None:
    """Append ``tail``, whose one parameter is the output of ``head``, to ``head``."""
    new = {tail.parameters["outputs"]: head.output}
    for at, value in enumerate(tail.values):
        if at not in new:
            new[at] = head.add_value(value, moving=at in tail.moving)
    for a in tail.applications:
        inputs = tuple(None if i is None else new[i] for i in a.inputs)
        head.applications.append(Application(a.primitive, inputs, new[a.output], a.name))
    head.output = new[tail.output]
    head.fallbacks = tuple(dict.fromkeys(head.fallbacks + tail.fallbacks))


def normalizer_of(task: Task) -> float:
    """Return what a named loss divides its sum by: the entries (mse) or the labels that count (cross entropy)."""
    if task.target is None or not isinstance(task.loss, str):
        return 1.0
    return float(task.target.numel() if task.loss == "mse" else (task.target != IGNORE_INDEX).sum())


def _samples_are_independent(task: Task) -> bool:
    """Tell whether the module treats samples one by one, by comparing its output on all with its output on parts.

    At the given parameters and at generic ones near them: a gate that is zero hides what it multiplies, but not its slope.
    """
    batch = task.batch
    if batch < 2 or task.target is None or task.target.ndim == 0 or task.target.shape[0] != batch:
        return False
    try:
        return all(_agree_on_parts(task, cut) for task in (task, _nearby(task)) for cut in {1, (batch + 1) // 3 or 1})
    except Exception:
        return False  # one sample at a time is only a matter of memory


def _agree_on_parts(task: Task, cut: int) -> bool:
    whole = task.call(task.parameters, *task.inputs)
    if whole.ndim == 0 or whole.shape[0] != task.batch:
        return False
    parts = torch.cat([task.call(task.parameters, *task.part(rows).inputs) for rows in (slice(0, cut), slice(cut, None))])
    tolerance = min(1e3 * torch.finfo(whole.dtype).eps, 1e-3) * float(whole.abs().max())
    return parts.shape == whole.shape and bool((parts - whole).abs().max() <= tolerance)


def _nearby(task: Task) -> Task:
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, p in task.parameters.items():
        step = 0.1 * (float(p.abs().max()) or 1.0)
        moved[name] = p + step * torch.randn(p.shape, generator=generator).to(p)
    return replace(task, parameters=moved)


def _symmetrise(matrix: Tensor) -> float:
    """Average with the transpose, in place and in strips; return the relative asymmetry found."""
    largest, worst, n = float(matrix.abs().max()), 0.0, matrix.shape[0]
    step = max(1, 2**22 // max(n, 1))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        upper, lower = matrix[rows, start:], matrix[start:, rows].T
        worst = max(worst, float((upper - lower).abs().max()))
        mean = (upper + lower) / 2
        matrix[rows, start:] = mean
        matrix[start:, rows] = mean.T
    return worst / largest if largest else 0.0

"""The exact Hessian, or its Gauss-Newton part, as a linear operator: products without the P x P matrix.

Values and adjoints are computed once, when the operator is made (see :mod:`hessiankit.engine.linearisation`); a product is
one sweep forward and one sweep back for a whole block of vectors, through whatever operations the module uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hessiankit.curvature.cuda_graph import Replayed
from hessiankit.curvature.evaluation import automatic
from hessiankit.curvature.kronecker import KroneckerFactors
from hessiankit.curvature.linearised_batches import check_effect, check_options, linearise_all, paged_model
from hessiankit.curvature.solving import PRECONDITIONERS, Solution, SymmetricOperator
from hessiankit.curvature.structures import StructuredOperator, diagonal_operator
from hessiankit.curvature.suboperators import BlockDiagonalOperator, SubOperator, positions
from hessiankit.engine.diagnosis import REMEDY
from hessiankit.engine.diagonal_sum import DiagonalSum, TooCostly
from hessiankit.engine.linearisation import LinearisedBatch, Recompute, linearise
from hessiankit.engine.paged_parameters import PagedParameters, PagedState
from hessiankit.engine.parameter_memory import ParameterMemory
from hessiankit.engine.parts import WORKSPACE
from hessiankit.engine.storage import empty
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.cancellation import ROUNDING, rounding_errors
from hessiankit.request.read import read_request
from hessiankit.request.second_order import SECOND_ORDER, compare_second_order
from hessiankit.request.signature import CurvatureArguments, asks
from hessiankit.request.state import ModuleState
from hessiankit.support.arguments import checked
from hessiankit.support.containers import map_tensors
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.inner_products import inner, norm
from hessiankit.support.progress import silent
from hessiankit.support.tape import Taped
from hessiankit.support.torch_state import LARGE, computed_later, full_precision, hand_back_memory, one_at_a_time, wide

if TYPE_CHECKING:
    from typing_extensions import Unpack

WHO = "hessian_operator"
Total: TypeAlias = Callable[[Iterable[Tensor], Sequence[float]], Tensor]
Progress: TypeAlias = Callable[[int, int], None]
REPLAYS: dict[str, type[Replayed | Taped]] = {"cuda": Replayed, "cpu": Taped}
MOST = 1000  # products that take as long as the diagonal of an approximation may


def weighted_sum(terms: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the batches' terms, each times its weight; many are summed in double precision, where the device has it."""
    rest = iter(terms)
    first = next(rest)
    if list(weights) == [1.0]:
        return first
    total = first.to(first.dtype if first.device.type == "mps" else torch.float64).mul_(weights[0])
    for weight, term in zip(weights[1:], rest, strict=True):
        total.add_(term, alpha=weight)
    return total.to(first.dtype)


def _product(
    linearised: Sequence[LinearisedBatch], weights: Sequence[float], total: Total, progress: Progress, rows: Tensor
) -> Tensor:
    def terms() -> Iterator[Tensor]:
        for done, one in enumerate(linearised, start=1):
            term = one.product(rows)
            progress(done, len(linearised))
            yield term

    return total(terms(), weights)


class HessianOperator(SymmetricOperator):
    """The Hessian of a scalar loss, or its Gauss-Newton part, known by its products; made by :func:`hessian_operator`.

    A ``scipy.sparse.linalg.LinearOperator``, symmetric: ``eigsh(operator, k=3)`` and the like take it directly. ``@`` takes
    torch vectors (P,) and matrices (P, k) on the operator's device and in its dtype, and NumPy arrays of the same shapes.
    ``@`` and ``solve`` also take tensors in the shapes of the parameters, a dict by name or a list in the order of ``names``,
    and return the same.

    Attributes:
        torch_dtype: Type of vectors; ``dtype`` is its name in NumPy, which SciPy needs. ``to_torch()`` is the operator with
            torch's ``dtype``, which the estimators of curvlinops need. A half-precision module has products in float32.
        names: Parameter names, in the order of the entries of a vector.
        slices: Entries of each parameter.
        kind: One of ``"hessian"``, ``"ggn"``, ``"fisher"``, ``"fisher-mc"``, ``"fisher-empirical"``.
        loss: The loss at this point.
        fallbacks: Operations without a closed form, which are differentiated automatically one by one.
        handshake: Whether loss and gradient were compared with those of the module's own call.
    """

    order = ", with entries in the order of named_parameters(), see .slices"
    is_replayable = True

    def __init__(
        self,
        batches: Sequence[BatchLoss],
        linearised: list[LinearisedBatch],
        kind: str,
        block_size: int | None,
        *,
        total: Total = weighted_sum,
        progress: Progress = silent,
    ) -> None:
        batch = batches[0]
        super().__init__((batch.size, batch.size), batch.dtype, batch.device)
        self.names, self.slices, self.shapes, self.kind = tuple(batch.parameters), batch.slices, batch.shapes, kind
        self._linearised, self._weights, self.handshake = (
            linearised,
            [batch.share for batch in batches],
            batch.reference is not None,
        )
        self._batches = [batch.unchecked() for batch in batches]
        self._approximations: dict[str, StructuredOperator] = {}
        self.loss = sum(w * b.loss for w, b in zip(self._weights, linearised, strict=True))
        self.fallbacks = tuple(dict.fromkeys(name for b in linearised for name in b.fallbacks))
        self.block_size = block_size or max(1, WORKSPACE // max(b.bytes_per_vector for b in linearised))
        self._total, self._block = total, partial(_product, linearised, self._weights, total, progress)
        quiet = self.is_replayable and total is weighted_sum and progress is silent  # a replay tells nothing to other ranks
        is_replayed = quiet and not self.fallbacks and batch.device.type in REPLAYS
        self._replayed = REPLAYS[batch.device.type](self._block) if is_replayed else None
        self._symmetry: float | None = None
        self._is_untested = True
        self._pair: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, batches: Sequence[BatchLoss], kind: str = "hessian", block_size: int | None = None) -> HessianOperator:
        """Return the operator of the losses of some batches."""
        with torch.no_grad():
            linearised = [linearise(batch, gauss_newton=kind != "hessian") for batch in batches]
        check_effect(batches, linearised)
        return cls(batches, linearised, kind, block_size)

    @cached_property
    def gradient(self) -> Tensor:
        """The gradient at this point, (P,); the first access costs half a product."""
        self._check_shared()
        with torch.no_grad(), full_precision():
            return self._total((b.gradient() for b in self._linearised), self._weights)

    @property
    def symmetry_error(self) -> float:
        """``|<u, H v> - <v, H u>|`` of two vectors, relative to ``|u| |H v|``: the rounding level.

        Of the first two vectors that were multiplied; before that, of two random ones, at the price of their products.
        """
        if self._symmetry is None:
            self._symmetry, self._pair, self._is_untested = self._asymmetry(*self._drawn(0), *self._drawn(1)), None, False
        return self._symmetry

    def _drawn(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return a random vector and its product."""
        generator = torch.Generator(self.device).manual_seed(seed)
        v = torch.randn(1, self.shape[0], generator=generator, dtype=self.torch_dtype, device=self.device)
        Hv = self._blocks(v)
        self._check_finite(v, Hv)
        return v[0], Hv[0]

    @torch.no_grad()
    def _rows(self, rows: Tensor) -> Tensor:
        products = self._blocks(rows)
        if self._is_untested and len(rows):
            self._test_symmetry(rows, products)
        return products

    @full_precision()
    def _blocks(self, rows: Tensor) -> Tensor:
        self._check_shared()
        product = self._replayed or self._block
        if len(rows) <= self.block_size:
            return product(rows) if len(rows) else rows.clone()
        result = empty(rows.shape, rows.dtype, rows.device)
        for part, into in zip(rows.split(self.block_size), result.split(self.block_size), strict=True):
            into.copy_(product(part))
        return result

    def _check_shared(self) -> None:
        """Raise InputError if a parameter without a copy has changed; it is read once for all batches."""
        for state in {id(batch.state): batch.state for batch in self._batches}.values():
            state.check_shared("HessianOperator")

    def __matmul__(self, other: Any) -> Any:
        if not _is_parameters(other):
            return super().__matmul__(other)
        return self._like(other, super().__matmul__(self._flat(other)))

    def solve(self, b: Any, **options: Any) -> Solution:
        """Return x with (H + damping I) x = b; options as in :func:`hessiankit.curvature.solving.solve`.

        Where b is tensors in the shapes of the parameters, so is x.
        """
        if not _is_parameters(b):
            return super().solve(b, **options)
        solution = super().solve(self._flat(b), **options)
        return replace(solution, x=self._like(b, solution.x))

    def _flat(self, tensors: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
        """Return tensors in the shapes of the parameters, and no others, as one vector (P,)."""
        named = tensors if isinstance(tensors, Mapping) else dict(zip(self.names, tensors, strict=False))
        seen = {name: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for name, x in named.items()}
        if len(tensors) != len(self.names) or seen != dict(self.shapes):
            misfit = next((name for name in self.names if seen.get(name) != self.shapes[name]), None)
            difference = (
                f"{len(tensors)} tensors"
                if misfit is None
                else f"{seen.get(misfit, 'nothing')} for {misfit!r} {self.shapes[misfit]}"
            )
            raise InputError(
                f"HessianOperator: {difference}; expected a tensor in the shape of each of the {len(self.names)} parameters"
            )
        return torch.cat([named[name].detach().reshape(-1) for name in self.names])

    def _like(self, tensors: Mapping[str, Tensor] | Sequence[Tensor], vector: Tensor) -> dict[str, Tensor] | list[Tensor]:
        """Return a vector (P,) as tensors in the shapes of the parameters, by name or in their order."""
        named = {name: vector[self.slices[name]].reshape(self.shapes[name]) for name in self.names}
        return named if isinstance(tensors, Mapping) else list(named.values())

    def __getitem__(self, key: Any) -> SubOperator:
        """Return a block of the matrix as an operator: ``operator[rows, columns]``, or ``operator[entries]`` for both.

        Rows and columns are a name, a pattern such as ``"h.0.attn.*"``, ``"name[index]"`` as in :meth:`hessiankit.Hessian.block`,
        or a list of these, which selects all that any of them means. Entries keep the order of the whole, each once.

        Raises:
            InputError: If something is not there.
        """
        rows, columns = key if isinstance(key, tuple) and len(key) == 2 else (key, key)
        at = [positions("HessianOperator", part, self.shapes, self.slices) for part in (rows, columns)]
        return SubOperator(self, *at)

    def block_diagonal(self, groups: Mapping[str, Any] | None = None) -> BlockDiagonalOperator:
        """Return the block-diagonal part of the matrix as an operator; a product with it takes one product of this one per block.

        Args:
            groups: Name -> what belongs to the group, as in ``operator[...]``; no entry in two groups, entries in none are zero.
                None: one block for each parameter.

        Raises:
            InputError: If groups overlap, or something is not there.
        """
        chosen = {name: name for name in self.names} if groups is None else groups
        return BlockDiagonalOperator(self, {n: positions(WHO, of, self.shapes, self.slices) for n, of in chosen.items()})

    @computed_later
    def approximation(self, name: str) -> StructuredOperator:
        """Return an approximation C of the matrix by name, built at the operator's point at the first call and kept.

        ``"diagonal"`` is the exact diagonal. ``"kfac"`` and ``"ekfac"`` are those of :func:`hessiankit.approximations`, of the
        Gauss-Newton part where ``kind="hessian"``; of ``kind="fisher-mc"`` all labels of a draw are pulled back at once. What has
        no factors, as embeddings and gains, has its exact diagonal: the sum of the squares of the gradients that the factors
        take, an estimate where labels are drawn. ``.inverse(damping)`` is what ``solve(b, damping=damping,
        preconditioner=name)`` takes.

        Raises:
            InputError: It cannot be made for this loss or module, or the exact diagonal, which ``"diagonal"`` and parameters that
                enter in another way than row by row need, takes longer than 1000 products; raised before other work.

        KFAC of one linear layer is its Hessian 2/(L d_out) X^T X (x) I:

        >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
        >>> H = hessian_operator(layer, x, torch.zeros(2, 1, dtype=torch.float64))
        >>> [[round(v, 9) for v in row] for row in H.approximation("kfac").to_matrix().tolist()]
        [[2.0, 2.0], [2.0, 4.0]]
        """
        check_name(WHO, "approximation", name, PRECONDITIONERS)
        if name not in self._approximations:
            self._check_shared()
            try:
                self._approximations[name] = self._approximated(name)
            except TooCostly as error:
                raise InputError(
                    f"{WHO}: the exact diagonal would take as long as about {error.products:,.0f} products, more than {MOST:,}; "
                    "take hessian_diagonal(..., method='auto'), also as preconditioner, or fewer params=[...]"
                ) from None
        return self._approximations[name]

    def diagonal(self) -> Tensor:
        """Return the exact diagonal (P,), as :meth:`approximation` ``("diagonal")`` keeps it; an InputError as there."""
        return self.approximation("diagonal").structures[0].values

    def trace(self) -> float:
        """Return the exact trace, the sum of :meth:`diagonal`; :func:`hessiankit.scalar_estimates` has one by products."""
        return float(self.diagonal().to(wide(self.device)).sum())

    def _approximated(self, name: str) -> StructuredOperator:
        def diagonal() -> Tensor:
            batches = [one.reference(batch) for batch, one in zip(self._batches, self._linearised, strict=True)]
            sums = DiagonalSum(WHO, batches, None, None, MOST)
            sums.run(gauss_newton=self.kind != "hessian" or name != "diagonal")
            return sums.entries

        if name == "diagonal":
            return diagonal_operator(diagonal())
        pooled = self.kind == "fisher-mc"
        factors = KroneckerFactors(self._batches, pooled=pooled, diagonal=diagonal, points=self._linearised)
        factors.check()
        parts = factors.kfac if name == "kfac" else factors.ekfac()
        factored = StructuredOperator(self.shape[0], parts, self.torch_dtype, self.device)
        return factored.completed(lambda: factors.diagonal)

    def _test_symmetry(self, rows: Tensor, products: Tensor) -> None:
        """Test the first products, (S, P): are they finite, and is <u, H v> = <v, H u> for the first two vectors?

        Where they are parallel two random ones take their place, at the price of their products.
        """
        self._check_finite(rows, products)
        previous = self._pair  # of its own: another thread may multiply too
        pairs = [*([] if previous is None else [previous]), *zip(rows[:2], products[:2], strict=True)]
        if len(pairs) == 1:
            is_large = self.shape[0] > LARGE
            self._pair, self._is_untested = (None, False) if is_large else ((rows[0].clone(), products[0].clone()), True)
            return
        (u, Hu), (v, Hv) = pairs[:2]
        if abs(inner(u, v)) < 0.99 * norm(u) * norm(v):
            self._symmetry, self._pair, self._is_untested = self._asymmetry(u, Hu, v, Hv), None, False
        else:  # or one is zero
            _ = self.symmetry_error

    def _check_finite(self, rows: Tensor, products: Tensor) -> None:
        if not products.numel():  # of a process that holds no entry
            return
        if not bool(torch.isfinite(torch.stack(torch.aminmax(products))).all()) and bool(torch.isfinite(rows).all()):
            place = self._origin()
            named = f": the operation {place}" if place else ""
            raise InputError(f"{WHO}: products with the Hessian are NaN or infinite{named}. {REMEDY}")

    def _origin(self) -> str | None:
        """Return a phrase that names the first operation with a value or derivative that is not finite, or None."""
        return next((phrase for b in self._linearised if (phrase := b.origin())), None)

    @full_precision()
    def _asymmetry(self, u: Tensor, Hu: Tensor, v: Tensor, Hv: Tensor) -> float:
        scale, difference = (norm(u) * norm(Hv) + norm(v) * norm(Hu)) / 2, abs(inner(u, Hv) - inner(v, Hu))
        error = difference / scale if scale else 0.0
        eps = max(torch.finfo(self.torch_dtype).eps, *(b.eps for b in self._linearised))
        allowed = eps**0.5
        if not error <= allowed:  # NaN too; where terms cancel, H is rounding of them
            errors = norm(u) * self._rounding_of(v) + norm(v) * self._rounding_of(u)
            error = difference / errors if difference <= ROUNDING * eps * errors else error
        if not error <= allowed:
            raise InputError(
                f"{WHO}: <u, Hv> and <v, Hu> differ by {error:.1e} of |u||Hv|, more than rounding ({allowed:.1e})"
                f"{automatic(self.fallbacks)}. An operation has a wrong second derivative or overflows, or terms cancel, as in a "
                "cross entropy by logsumexp at a loss of almost 0 (loss='cross_entropy' does not); write it in other operations, "
                "or use a wider dtype"
            )
        return error

    def _rounding_of(self, v: Tensor) -> float:
        """Return the norm of the rounding error of H v, for a unit roundoff of 1."""
        direction = {name: v[entries].reshape(self.shapes[name]) for name, entries in self.slices.items()}

        def errors() -> Iterator[Tensor]:
            for batch in self._batches:
                _, error = rounding_errors(batch, direction, gauss_newton=self.kind != "hessian")
                yield torch.cat([error[name].reshape(1, -1) for name in self.slices], 1)

        return norm(self._total(errors(), self._weights))


class PagedOperator(HessianOperator):
    """A :class:`HessianOperator` whose parameters are brought where products read them; it has products alone."""

    is_replayable = False

    def _origin(self) -> None:
        """Return None: to find the operation takes the whole model."""

    def _rounding_of(self, v: Tensor) -> float:
        """Return 0: the values that show how much cancels are not held, so an asymmetry beyond rounding is an error."""
        return 0.0

    def approximation(self, name: str) -> NoReturn:
        """Refuse: an approximation needs whole layers."""
        raise InputError(
            f"{WHO}: {name!r} takes whole layers, and parameters are brought where products read them; pass a diagonal, an "
            "operator or a function as preconditioner"
        )


def _is_parameters(x: Any) -> bool:
    """Tell whether an argument is tensors by name, or a sequence of them."""
    return isinstance(x, Mapping) or (isinstance(x, (list, tuple)) and any(isinstance(part, Tensor) and part.ndim for part in x))


@checked("hessian_operator")
@one_at_a_time
@asks(CurvatureArguments)
def hessian_operator(
    module: nn.Module,
    data: Any,
    target: Any = None,
    *,
    block_size: int | None = None,
    recompute: Recompute = None,
    micro_batch: int | None = None,
    snapshot: bool | None = None,
    offload: bool | str | torch.device = False,
    progress: Callable[[int, int], None] | None = None,
    **asked: Unpack[CurvatureArguments],
) -> HessianOperator:
    """Return the exact Hessian of ``loss(module(inputs), target)`` as a linear operator, by closed forms.

    The module is traced and linearised here, once for each batch, at its parameters; later training does not affect the
    operator (``snapshot``). This costs about three gradients, a product about two; below some hundred thousand parameters calls
    of Python take the time, that of up to 18 gradients. Memory: what the derivatives need of the module's values for all the
    data, and in a product at most about 512 MiB of tangents (``block_size`` vectors at a time, chosen to stay below that; a CPU
    takes fewer together, as its caches hold), never P x P. On a CPU the ninth product of one number of vectors is recorded, and
    later ones repeat its operations in up to 32 MiB. The first two products are tested: they are finite, and
    <u, H v> = <v, H u>. From 4 million parameters on no vector of that size is kept for these tests: only vectors multiplied
    together are tested, and one operation of each kind when the operator is built.

    Args:
        module: The function under study, as in :func:`hessiankit.hessian`.
        data: The inputs, with ``target``, or several batches, as there.
        target: What the loss compares with.
        block_size: Vectors of a block treated at once.
        recompute: ``"layers"``: keep the residual stream between sublayers and the results of products with weights; recompute
            the rest in every product, a sublayer at a time, as activation checkpointing does. 1.4 to 3 times the time. Less
            memory where many tokens are treated together; the set-up needs the same memory as without it.
        micro_batch: Samples treated at once, each part anew in every product: the memory of so many samples, or of the largest
            batch where all are smaller. A batch is split for losses 'mse', 'cross_entropy' and torch's own, and samples that do
            not depend on each other.
        snapshot: Whether to keep copies of the parameters. Without, nothing is copied, and a product after a change of the
            parameters is an error. None: copies of up to 4 million parameters, unless ``recompute`` or ``micro_batch`` is given.
        offload: The device that computes, for a module that lies on the host and is larger than it; True: torch's accelerator.
            Parameters are moved there for the steps that read them, a sublayer at a time, as their directions are, and
            derivatives back; vectors lie on the host. With ``recompute="layers"``, without copies of the parameters.
        progress: Called with (batches done, batches in all) in every product.
        **asked: Arguments of :class:`~hessiankit.request.signature.CurvatureArguments`.

    Raises:
        InputError: If an argument cannot be used, or if the module is not a function: it draws random numbers, or a call
            changes its buffers or its result.
        TraceError: If torch cannot trace the module.

    The Hessian of a linear layer under squared error, 2/(L d_out) X^T X (x) I, known by hand:

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    >>> operator = hessian_operator(layer, x, torch.zeros(2, 1, dtype=torch.float64))
    >>> (operator @ torch.tensor([1.0, 1.0], dtype=torch.float64)).tolist()
    [4.0, 6.0]
    """
    check_options(block_size, recompute, micro_batch)
    others = {"micro_batch": micro_batch, "snapshot": snapshot, "handshake": asked.get("handshake") == SECOND_ORDER}
    paged = None if offload is False else paged_model(module, offload, [name for name, value in others.items() if value])
    is_large = sum(p.numel() for p in module.parameters() if not is_lazy(p)) > LARGE
    lean = recompute is not None or micro_batch is not None or is_large
    share = lean if snapshot is None else not snapshot
    state = partial(ModuleState, share=share) if paged is None else partial(PagedState, paged)
    memory = ParameterMemory if paged is None else partial(PagedParameters, paged)
    recompute = recompute if paged is None else "layers"
    with nullcontext() if paged is None else paged.plain():
        request = read_request(module, data, target, state=state, compares=True, **asked)
        if paged is not None:
            request = replace(request, pairs=map(partial(map_tensors, lambda x: x.to(paged.device)), request.pairs))
        batches, linearised = linearise_all(request, recompute=recompute, micro_batch=micro_batch, memory=memory)
        check_effect(batches, linearised)
        kind = HessianOperator if paged is None else PagedOperator
        operator = kind(batches, linearised, request.curvature.kind, block_size, progress=progress or silent)
    if request.second_order and paged is None:
        eps = max(torch.finfo(operator.torch_dtype).eps, *(b.eps for b in linearised))
        compare_second_order(batches, eps, operator.__matmul__)
    batches.clear()  # with the module's own gradient
    hand_back_memory(operator.shape[0])
    return operator


def check_fallbacks(batches: Sequence[BatchLoss], kind: str, diagonal: Tensor | None = None) -> None:
    """Test products for symmetry, and against the largest entry of a diagonal: half a matrix does not show lost digits."""
    operator = HessianOperator.of(batches, kind)
    _ = operator.symmetry_error
    if diagonal is None:
        return
    at = int(diagonal.abs().argmax())
    unit = torch.zeros_like(diagonal)
    unit[at] = 1.0
    seen, expected = float(diagonal[at]), float((operator @ unit)[at])
    allowed = max(torch.finfo(diagonal.dtype).eps, *(b.eps for b in operator._linearised)) ** 0.5
    if not abs(seen - expected) <= allowed * max(abs(seen), abs(expected)):
        raise InputError(
            f"{WHO}: the largest entry of the diagonal is {seen:.6g}, and {expected:.6g} by a product with the Hessian"
            f"{automatic(operator.fallbacks)}. An operation has lost its digits; write it in other "
            "operations, or use a wider dtype"
        )

"""Preconditioners P, and the matrix P^(-1/2) H P^(-1/2), whose eigenvalues are those of H in the metric of P."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Optimizer

from hessiankit.curvature.solving import SymmetricOperator
from hessiankit.curvature.structures import Structure, StructuredOperator, dense_block, diagonal_operator
from hessiankit.curvature.suboperators import SubOperator
from hessiankit.curvature.tensor_operator import TensorOperator
from hessiankit.landscape.optimizer_states import Metric, Optimizers, decay_note, listed, name_of, places_of, reader_of, sgd
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict
from hessiankit.support.tables import Piece, Printed
from hessiankit.tracing.source_line import returned

FORMS = (
    "a torch optimizer or a list of them, a diagonal (one tensor or one for each parameter by name), a symmetric positive "
    "matrix or operator, or a function of the dict of parameters that returns a diagonal"
)


@dataclass(frozen=True, repr=False, eq=False)
class Preconditioner(Printed, WithDict):
    """A symmetric positive P, by whose inverse an optimizer multiplies the gradient.

    Attributes:
        name: The optimizer's class, ``"diagonal"`` or ``"operator"``.
        root: P^(-1/2).
        lr: The largest learning rate; NaN without an optimizer, like the threshold.
        threshold: The eigenvalue above which the optimizer's steps on the quadratic model diverge, with the present P. If the
            thresholds of parameter groups differ, this is the smallest, and P is scaled by each group's threshold over it, so
            that one threshold holds for all.
        rule: The threshold in words.
        notes: Terms that the eigenvalues do not contain.
    """

    name: str
    root: StructuredOperator
    lr: float = math.nan
    threshold: float = math.nan
    rule: str = ""
    notes: tuple[str, ...] = ()

    _hidden = ("root",)

    def of(self, rows: Tensor) -> Preconditioner:
        """Return the preconditioner of descent in some entries alone: the inverse of the block (P^-1)[rows, rows]."""
        root, rows = self.root, rows.to(self.root.device)
        if len(root.structures) == 1 and type(root.structures[0]) is Structure:
            return replace(self, root=diagonal_operator(root.structures[0].values[rows]))
        inverse = SubOperator(root.mapped(torch.square), rows, rows).to_matrix()
        block = dense_block(torch.arange(len(rows), device=root.device), inverse).root()
        return replace(self, root=StructuredOperator(len(rows), [block], root.torch_dtype, root.device))

    def ratio(self, eigenvalue: float) -> float:
        """Return an eigenvalue over the threshold."""
        return eigenvalue / self.threshold

    def _headline(self) -> str:
        limit = f", steps diverge above {self.threshold:.6g} = {self.rule}, lr {self.lr:g}" if self.rule else ""
        return f"in the metric of {self.name}{limit}"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        yield from self.notes


class PreconditionedOperator(SymmetricOperator):
    """P^(-1/2) A P^(-1/2) of a symmetric operator A.

    >>> A = diagonal_operator(torch.tensor([3.0, 5.0]))
    >>> PreconditionedOperator(A, preconditioner_of("example", torch.tensor([1.0, 4.0]), A)).to_matrix().tolist()
    [[3.0, 0.0], [0.0, 1.25]]
    """

    def __init__(self, operator: TensorOperator, preconditioner: Preconditioner) -> None:
        super().__init__((operator.shape[0], operator.shape[1]), operator.torch_dtype, operator.device)
        self.operator, self.root, self.block_size = operator, preconditioner.root, operator.block_size

    def _rows(self, rows: Tensor) -> Tensor:
        return self.root._rows(self.operator._rows(self.root._rows(rows)))


def preconditioner_of(caller: str, form: Any, matrix: Any, module: nn.Module | None = None) -> Preconditioner:
    """Return the preconditioner that a user asked for, in one of :data:`FORMS`.

    ``matrix`` is the operator that it is for, with ``slices`` and ``shapes`` where parameters have names; ``module`` has the
    parameters that an optimizer holds and a function is called with.
    """
    size, like = matrix.shape[0], {"dtype": matrix.torch_dtype, "device": matrix.device}
    is_optimizer = isinstance(form, Optimizer) or (
        isinstance(form, Sequence) and form and all(isinstance(x, Optimizer) for x in form)
    )
    is_function = callable(form) and not isinstance(form, (Optimizer, LinearOperator, Tensor))
    if is_optimizer or is_function:
        if module is None:
            what = "an optimizer's parameters are those" if is_optimizer else "a function is called with the parameters"
            raise InputError(f"{caller}: {what} of a module; pass the module with its data")
        parameters: dict[str, Tensor] = {name: module.get_parameter(name) for name in matrix.slices}
        if is_optimizer:
            return optimizer_preconditioner(caller, form, parameters, **like)
        with torch.no_grad():
            form = returned(f"{caller}: preconditioner, called with a dict of the parameters,", form, parameters)
    if isinstance(form, Mapping):
        form = _flat(caller, form, matrix)
    if isinstance(form, LinearOperator) or (isinstance(form, (Tensor, np.ndarray)) and form.ndim == 2):
        if tuple(form.shape) != (size, size):
            raise InputError(f"{caller}: preconditioner is {tuple(form.shape)}; expected ({size}, {size})")
        return Preconditioner("operator", _root(caller, form, **like))
    if not isinstance(form, (Tensor, np.ndarray)):
        raise InputError(f"{caller}: preconditioner is a {type(form).__name__}; expected {FORMS}")
    values = torch.as_tensor(form).detach().to(**like)
    if tuple(values.shape) != (size,):
        raise InputError(f"{caller}: preconditioner has shape {tuple(values.shape)}; expected a diagonal ({size},)")
    if not bool((values > 0).all()) or not bool(torch.isfinite(values).all()):
        raise InputError(
            f"{caller}: the preconditioner's diagonal has an entry that is not a positive number; add a damping to it"
        )
    return Preconditioner("diagonal", diagonal_operator(values.rsqrt()))


@torch.no_grad()
def optimizer_preconditioner(
    caller: str, optimizer: Optimizers, parameters: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device
) -> Preconditioner:
    """Return the metric of an optimizer, or of several, for the entries of some parameters, which are recognised by identity.

    >>> layer = nn.Linear(1, 1)
    >>> descent = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9)
    >>> of = {"dtype": torch.float32, "device": torch.device("cpu")}
    >>> P = optimizer_preconditioner("example", descent, dict(layer.named_parameters()), **of)
    >>> P.root.to_matrix().tolist(), round(P.threshold, 6), P.rule
    ([[1.0, 0.0], [0.0, 1.0]], 7.6, '2 (1 + momentum) / ((1 - dampening) lr)')
    """
    optimizers = listed(caller, optimizer)
    names, readers = name_of(optimizers), {id(one): reader_of(caller, one) for one in optimizers}
    metrics: list[tuple[Metric, float, Tensor]] = []  # with lr K / 2, and the factors of slices with rates of their own
    largest, decays = 0.0, dict[tuple[float, bool], None]()
    for parameter, (held_by, group, k) in places_of(caller, optimizers, parameters).items():
        p, name, reader = parameters[parameter], type(held_by).__name__, readers[id(held_by)]
        if group.get("maximize"):
            raise InputError(f"{caller}: {name} has maximize=True and climbs; pass the optimizer of a loss that is minimised")
        state = held_by.state.get(p, {})
        if reader is not sgd and not float(state.get("step", 0)):
            raise InputError(
                f"{caller}: {name} has moved {parameter!r} by no step, so its state holds no metric yet; take one, or leave it "
                "out with params=[...]"
            )
        metric, factors, lr = reader(p, state, group), torch.ones_like(p), float(group["lr"])
        if k < len(cuts := group.get("slices", ())):  # of hessiankit.blockwise_lr
            for piece in cuts[k]["pieces"]:
                factors.narrow(cuts[k]["axis"], piece["start"], piece["stop"] - piece["start"]).mul_(piece["factor"])
        metrics.append((metric, lr * metric.response / 2, factors))
        largest = max(largest, lr * float(factors.max()))
        if decay := float(group.get("weight_decay", 0.0)):
            decoupled = group.get("decoupled_weight_decay", isinstance(held_by, (AdamW, Adafactor)))
            decays[decay, bool(decoupled)] = None
    if not largest > 0:
        raise InputError(f"{caller}: the learning rate of {names} is {largest:g}, and nothing moves; set one above 0")
    fastest, rule = max((speed * float(factors.max()), metric.threshold) for metric, speed, factors in metrics)
    root = torch.cat([(speed / fastest * factors / metric.P).sqrt().reshape(-1) for metric, speed, factors in metrics])
    if not bool(torch.isfinite(root).all()):
        raise InputError(f"{caller}: {names} divides by 0, NaN or infinity in some entries; its eps has to be above 0")
    notes = tuple(decay_note(decay, decoupled) for decay, decoupled in decays)
    return Preconditioner(names, diagonal_operator(root.to(device, dtype)), largest, 1 / fastest, rule, notes)


def _root(caller: str, P: Any, dtype: torch.dtype, device: torch.device) -> StructuredOperator:
    """Return P^(-1/2) of an operator or a matrix: by its structure where it has one, else of the dense matrix."""
    if not isinstance(P, StructuredOperator):
        dense = P.to_matrix() if isinstance(P, TensorOperator) else P
        dense = dense @ np.eye(dense.shape[0]) if isinstance(dense, LinearOperator) else dense
        dense = torch.as_tensor(dense).detach().to(device, dtype)
        error, scale = float((dense - dense.T).abs().max()), float(dense.abs().max())
        if not error <= torch.finfo(dtype).eps ** 0.5 * scale:
            raise InputError(f"{caller}: the preconditioner and its transpose differ by {error:.1e}; pass a symmetric one")
        P = StructuredOperator(len(dense), [dense_block(torch.arange(len(dense), device=device), dense)], dtype, device)
    smallest = min(float(part.values.min()) for part in P.structures) if not len(P.rest) else 0.0
    if not smallest > 0:
        raise InputError(
            f"{caller}: the preconditioner has an eigenvalue of {smallest:.3g}; pass a positive one, such as P + damping I"
        )
    return P.mapped(torch.rsqrt)


def _flat(caller: str, diagonals: Mapping[str, Any], matrix: Any) -> Tensor:
    """Return a diagonal by name as one vector."""
    shapes = getattr(matrix, "shapes", {})
    kinds = {name: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for name, x in diagonals.items()}
    parameter: Any = next((name for name in (*shapes, *kinds) if kinds.get(name) != shapes.get(name)), None)
    if parameter is not None or not shapes:
        shape = shapes.get(parameter, "no such parameter") if shapes else "an operator with parameters by name"
        raise InputError(f"{caller}: preconditioner has {kinds.get(parameter, 'nothing')} for {parameter!r}; expected {shape}")
    return torch.cat([diagonals[name].reshape(-1) for name in matrix.slices])

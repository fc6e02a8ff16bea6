"""Comparison of the user's own closed form of a Jacobian with automatic differentiation and hessiankit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.tracing.source_line import returned
from hessiankit.verify.check import check
from hessiankit.verify.check_report import CheckReport
from hessiankit.verify.probes import normal

CALLER = "check_jacobian"


class Pairing(nn.Module):
    """<output, f(x)>, whose Hessian has the Jacobian of f as its block (output, x).

    Attributes:
        output: A constant with the shape of f(x); in the report its name stands for f(x).
        x: The point.
    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor, output: Tensor) -> None:
        super().__init__()
        self.f, self.x, self.output = f, nn.Parameter(x), nn.Parameter(output)

    def forward(self) -> Tensor:
        return (self.output * self.f(self.x)).sum()


@checked(CALLER, leave=("f", "x", "analytic"))
def check_jacobian(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    analytic: Any,
    against: Iterable[str] | None = None,
    rtol: float | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float64,
) -> CheckReport:
    """Compare a closed form of the Jacobian d vec_r f(x) / d vec_r(x)^T with automatic differentiation and hessiankit.

    The Jacobian is the block (output, x) of the Hessian of <output, f(x)>, with a constant ``output`` drawn from ``seed``.
    :func:`hessiankit.check` compares that Hessian, and reports the change that corrects a wrong closed form.

    Args:
        f: A function of one tensor, or a module, whose parameters are constant.
        x: The point, with n entries, of any shape.
        analytic: The closed form: a matrix (m, n), m the number of entries of f(x), or a tensor of the shape of f(x) followed by
            that of x, entries in row-major order (vec_r); or a function of x that returns one of them.
        against: Names of the references, like the other arguments as in :func:`hessiankit.check`.
        rtol: Tolerance relative to the largest entry.
        seed: Seed of all random numbers.
        dtype: The dtype of the check; None for that of x.

    Returns:
        A :class:`CheckReport`, whose row "analytic: output x x" is about the closed form.

    Raises:
        InputError: x is no tensor of real numbers, f fails or returns something else, or the closed form has another shape.

    >>> bool(check_jacobian(torch.sin, torch.tensor([0.5, 1.0]), analytic=lambda x: torch.diag(x.cos())))
    True
    """
    _require_real("x", x)
    y = returned(f"{CALLER}: f(x)", f, x)
    _require_real("f(x)", y)
    output = normal(y.shape, torch.Generator().manual_seed(seed), y)
    blocks = (lambda point: {("output", "x"): analytic(point["x"])}) if callable(analytic) else {("output", "x"): analytic}
    pairing = Pairing(f, x.detach().clone(), output)
    names = ["output", "x"]
    return check(pairing, (), loss=None, params=names, analytic=blocks, against=against, rtol=rtol, seed=seed, dtype=dtype)


def _require_real(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise InputError(f"{CALLER}: {name} is {kind}; expected a tensor of real floating-point numbers")

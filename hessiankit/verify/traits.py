"""What one forward pass reveals about a module that a reference is known to trip over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hessiankit.verify.problem import Problem


@dataclass(frozen=True)
class Traits:
    """Findings of ``traits``.

    Args:
        layer_norm_gain: A ``layer_norm`` with a gain was called on differentiated values.
        precision: The lowest floating type that differentiated values pass through.
        lowered_by: The operation that first went below the type of the parameters; "" where none did.
    """

    layer_norm_gain: bool
    precision: torch.dtype
    lowered_by: str


def traits(problem: Problem) -> Traits:
    """Run the loss once and watch its operations.

    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)).double()
    >>> x = torch.eye(2, dtype=torch.float64)
    >>> traits(Problem(module, x, x))
    Traits(layer_norm_gain=True, precision=torch.float64, lowered_by='')
    """
    watch = _Watch(problem.dtype)
    theta = problem.theta.clone().requires_grad_()
    with torch.enable_grad(), watch:
        problem.flat_loss(theta)
    return Traits(watch.layer_norm_gain, watch.precision, watch.lowered_by)


def known_defect(group: str, found: Traits) -> str:
    """Return the known defect of a group of references that a module of these traits runs into, or ""."""
    return next((text for defective, applies, text in _DEFECTS if defective == group and applies(found)), "")


_DEFECTS: Sequence[tuple[str, Callable[[Traits], bool], str]] = (
    (
        "jacfwd(jacrev)",
        lambda found: found.layer_norm_gain,
        "known torch defect: the derivative through layer_norm with a gain loses a term (pytorch issues 196700, 198017)",
    ),
)


class _Watch(TorchFunctionMode):
    """Notes layer norms with a gain and casts to a lower precision among the differentiated values."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_norm_gain = False
        self.precision, self.lowered_by = dtype, ""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call through, and look at what came out."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.requires_grad and result.is_floating_point():
            name = getattr(func, "__name__", "")
            gain = kwargs.get("weight", args[2] if len(args) > 2 else None)
            self.layer_norm_gain |= name == "layer_norm" and gain is not None
            if torch.finfo(result.dtype).eps > torch.finfo(self.precision).eps:
                self.precision, self.lowered_by = result.dtype, name
        return result

"""One row of a report of :func:`hessiankit.check`."""

from __future__ import annotations

from dataclasses import dataclass

FORMULAS = "vec_r"
"""The reference of rows that compare the formulas of the chapters with the fast path."""

MODULE = "the module"
"""The reference of rows that compare loss and gradient with those of the user's own call."""

ZERO = "0 (exact)"
ROUNDING = "0 to rounding"

SAME_CALL = {
    "loss": "loss of the same call",
    "gradient": "gradient of hessian_operator",
    "operator": "products of hessian_operator",
    "diagonal": "hessian_diagonal",
    "wide twin": "the same block at widths above 16, four heads, W_O, gelu",
}
"""Rows other than of block pairs, by the beginning of their names: "gradient: W" is of the parameter W."""


@dataclass(frozen=True)
class CheckRow:
    """One comparison with one healthy reference: of a block pair, or of loss, gradient, operator or diagonal of the same call.

    Attributes:
        name: The block pair, "row parameter x column parameter"; or "loss", "gradient: parameter", "operator: parameter"
            (products of ``hessian_operator`` along directions on it), "diagonal: parameter" (``hessian_diagonal``), "wide
            twin: parameter" (of a block of the same structure at larger widths).
        reference: The reference.
        max_rel_error: Largest difference, relative to the largest entry of the block pair.
        passed: Whether it lies within the tolerance plus the reference's estimate of its own error.
        seconds: Time of the reference for all block pairs together.
        method: The dtype of the comparison; for exact arithmetic see ``CheckReport.exact``.
        zero: ``ZERO`` where both sides are exactly 0; ``ROUNDING`` where the row passed, but the block has no relative error: the
            closed form is 0 up to rounding of the whole Hessian, and so is the reference, or it is within its own error.
            ``max_rel_error`` then is 0.
    """

    name: str
    reference: str
    max_rel_error: float
    passed: bool
    seconds: float
    method: str = "float64"
    zero: str = ""

    @property
    def shown(self) -> str:
        """The error as it is printed: a number, or that the block is 0."""
        return self.zero or f"{self.max_rel_error:.1e}{'' if self.passed else ' FAIL'}"

    @property
    def of_same_call(self) -> bool:
        """Whether it is about loss, gradient, operator or diagonal instead of a block pair."""
        return self.name.partition(":")[0] in SAME_CALL
